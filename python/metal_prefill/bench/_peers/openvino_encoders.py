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
import openvino as ov

from metal_prefill.bench._engines import Adapter, Options
from metal_prefill.bench._peers.padded_texts import PaddedTexts, export

_CALIBRATION = (100, 64)  # texts, and tokens of each


def load(options: Options) -> Adapter:
    texts, int8 = PaddedTexts("openvino", options), options.compute not in ("f32", "bf16")
    config: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(texts.threads),
        **({} if int8 else {"INFERENCE_PRECISION_HINT": options.compute}),
    }
    with tempfile.TemporaryDirectory() as folder:
        core = ov.Core()
        model = core.read_model(export(texts.path, Path(folder) / "model.onnx"))
        model = _quantized(model, texts.config.vocab_size) if int8 else model
        compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    shared = {"share_inputs": True, "share_outputs": True}
    texts.states = lambda ids, mask: request.infer({"input_ids": ids, "attention_mask": mask}, **shared)[0]
    texts.build = f"OpenVINO {ov.get_version().split('-')[0]}, NNCF {nncf.__version__}"
    hint = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    texts.arithmetic = f"weights and activations in 8 bits (static), {hint}" if int8 else str(hint)
    return texts


def _quantized(model: ov.Model, vocab_size: int) -> ov.Model:
    texts, tokens = _CALIBRATION
    ids = np.random.default_rng(0).integers(vocab_size, size=(texts, 1, tokens))
    batches = [{"input_ids": row, "attention_mask": np.ones_like(row)} for row in ids]
    return nncf.quantize(
        model, nncf.Dataset(batches), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches)
    )
