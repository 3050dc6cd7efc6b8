"""ONNX Runtime on the CPU, for text embedding with encoders, in 8 bits; `compute="f32"` keeps float32.

The graph is exported from transformers' model of the same weights, which is how such models are published.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnxruntime

from metal_prefill.bench._engines import Adapter, Options
from metal_prefill.bench._peers.padded_texts import PaddedTexts, export


def load(options: Options) -> Adapter:
    texts, int8 = PaddedTexts("onnxruntime", options), options.compute != "f32"
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = texts.threads
    settings.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        graph = export(texts.path, Path(folder) / "model.onnx")
        graph = _quantized(graph) if int8 else graph
        session: Any = onnxruntime.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])
    texts.states = lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    texts.build = f"ONNX Runtime {onnxruntime.__version__}"
    texts.arithmetic = "weights and activations in 8 bits (quantize_dynamic)" if int8 else "float32"
    return texts


def _quantized(graph: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = graph.with_name("quantized.onnx")
    quantize_dynamic(graph, small, weight_type=QuantType.QInt8)
    return small
