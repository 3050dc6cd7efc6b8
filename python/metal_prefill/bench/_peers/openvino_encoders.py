"""OpenVINO on the CPU, for text embedding with encoders.

NNCF quantizes the graph of transformers' model statically, to 8-bit weights and activations;
`compute="f32"` and `compute="bf16"` keep the weights in float32 and set the arithmetic.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import numpy.typing as npt
import openvino as ov

from metal_prefill.bench._engines import Options
from metal_prefill.bench._peers.padded_texts import PaddedTexts, export

_CALIBRATION = (100, 64)  # texts, and tokens of each


class OpenVinoTexts(PaddedTexts):
    """Compiled graph of an encoder."""

    def __init__(self, options: Options) -> None:
        super().__init__("openvino", options)
        with tempfile.TemporaryDirectory() as folder:
            core = ov.Core()
            model = core.read_model(export(self.path, Path(folder) / "model.onnx"))
            self._int8 = options.compute not in ("f32", "bf16")
            config: dict[str, Any] = {
                "PERFORMANCE_HINT": "LATENCY",
                "NUM_STREAMS": "1",
                "INFERENCE_NUM_THREADS": str(self.threads),
            }
            if self._int8:
                model = self._quantized(model)
            else:
                config["INFERENCE_PRECISION_HINT"] = options.compute
            self._compiled = core.compile_model(model, "CPU", config)
        self._request = self._compiled.create_infer_request()

    def _quantized(self, model: ov.Model) -> ov.Model:
        ids = np.random.default_rng(0).integers(
            self.config.vocab_size, size=(_CALIBRATION[0], 1, _CALIBRATION[1])
        )
        batches = [{"input_ids": row, "attention_mask": np.ones_like(row)} for row in ids]
        return nncf.quantize(
            model, nncf.Dataset(batches), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches)
        )

    @property
    def build(self) -> str:
        """Names and versions of the libraries."""
        return f"OpenVINO {ov.get_version().split('-')[0]}, NNCF {nncf.__version__}"

    @property
    def arithmetic(self) -> str:
        """Number formats of weights and activations."""
        hint = self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return f"weights and activations in 8 bits (static), {hint}" if self._int8 else str(hint)

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the last hidden states of a batch."""
        results = self._request.infer(
            {"input_ids": ids, "attention_mask": mask}, share_inputs=True, share_outputs=True
        )
        states: npt.NDArray[np.float32] = results[0]
        return states
