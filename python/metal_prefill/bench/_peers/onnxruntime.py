"""ONNX Runtime on the CPU, for text embedding with encoders.

The graph is exported from transformers' model of the same weights, which is how such models are published.
Matrices are rounded to 8 bits, and activations at run time (`quantize_dynamic`); `compute="f32"` keeps
float32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from metal_prefill.bench._engines import Engine, Options
from metal_prefill.bench._peers.padded_texts import PaddedTexts, export


class _OnnxRuntime(PaddedTexts):
    """Session of an exported graph."""

    def __init__(self, options: Options) -> None:
        super().__init__("onnxruntime", options)
        self._int8 = options.compute != "f32"
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = self.threads
        settings.inter_op_num_threads = 1
        with tempfile.TemporaryDirectory() as folder:
            graph = export(self.path, Path(folder) / "model.onnx")
            if self._int8:
                graph = _quantized(graph)
            self._session: Any = onnxruntime.InferenceSession(
                str(graph), settings, providers=["CPUExecutionProvider"]
            )

    @property
    def build(self) -> str:
        return f"ONNX Runtime {onnxruntime.__version__}"

    @property
    def arithmetic(self) -> str:
        return "weights and activations in 8 bits (quantize_dynamic)" if self._int8 else "float32"

    def states(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        [states] = self._session.run(None, {"input_ids": ids, "attention_mask": mask})
        result: npt.NDArray[np.float32] = states
        return result


def _quantized(graph: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = graph.with_name("quantized.onnx")
    quantize_dynamic(graph, small, weight_type=QuantType.QInt8)
    return small


def load(options: Options) -> Engine:
    return _OnnxRuntime(options)
