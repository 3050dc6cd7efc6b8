"""ONNX Runtime on the CPU, for text embedding with encoders.

The graph is exported from transformers' model of the same weights, which is how such models are published.
Matrices are rounded to 8 bits, and activations at run time (`quantize_dynamic`); `compute="f32"` keeps
float32.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch

from metal_prefill.bench._engines import Options, TextEngine
from metal_prefill.bench._peers.padded_texts import PaddedTexts
from metal_prefill.bench._peers.torch_encoders import NAMES, load_encoder


class OnnxRuntime(PaddedTexts):
    """Session of an exported graph."""

    def __init__(self, options: Options) -> None:
        super().__init__("onnxruntime", options, tuple(NAMES))
        self._int8 = options.compute != "f32"
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = self.threads
        settings.inter_op_num_threads = 1
        with tempfile.TemporaryDirectory() as folder:
            graph = _export(self.path, Path(folder) / "model.onnx")
            if self._int8:
                graph = _quantized(graph)
            self._session: Any = onnxruntime.InferenceSession(
                str(graph), settings, providers=["CPUExecutionProvider"]
            )

    @property
    def build(self) -> str:
        """Name and version of the library."""
        return f"ONNX Runtime {onnxruntime.__version__}"

    @property
    def arithmetic(self) -> str:
        """Number formats of weights and activations."""
        return "weights and activations in 8 bits (quantize_dynamic)" if self._int8 else "float32"

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the last hidden states of a batch."""
        [states] = self._session.run(None, {"input_ids": ids, "attention_mask": mask})
        result: npt.NDArray[np.float32] = states
        return result


class _States(torch.nn.Module):  # type: ignore[misc]
    """Encoder whose only output is the last hidden states."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, ``[texts, tokens, dim]``."""
        states: torch.Tensor = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        return states


def _export(path: Path, graph: Path) -> Path:
    ids = torch.ones(2, 8, dtype=torch.long)
    axes = {0: "texts", 1: "tokens"}
    with warnings.catch_warnings():
        # The exporter that does not warn needs another package and gains nothing for these graphs.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _States(load_encoder(path, "eager")).eval(),
            (ids, torch.ones_like(ids)),
            str(graph),
            input_names=["input_ids", "attention_mask"],
            output_names=["states"],
            dynamic_axes={"input_ids": axes, "attention_mask": axes, "states": axes},
            opset_version=17,
            dynamo=False,
        )
    return graph


def _quantized(graph: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = graph.with_name("quantized.onnx")
    quantize_dynamic(graph, small, weight_type=QuantType.QInt8)
    return small


def load(options: Options) -> TextEngine:
    """Load the model."""
    return OnnxRuntime(options)
