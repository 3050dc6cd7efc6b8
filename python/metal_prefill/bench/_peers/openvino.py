"""OpenVINO on the same GGUF file, as docs/benchmarking.md describes.

OpenVINO GenAI makes the graph, and OpenVINO itself compiles it, so that a prompt can be timed without the
tokenizer and sampler of GenAI's pipeline. `compute="f32"` selects float32 arithmetic.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from metal_prefill._support.messages import counted
from metal_prefill.bench._engines import Adapter, BenchError, Identity, Ids, Options
from metal_prefill.bench._machine import available_threads
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.storage._cache_folder import cache_folder

_SHOWN_LINES = 3  # of the output of a failed conversion
_CONVERT = """
import sys
import openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""


def convert(path: Path) -> Path:
    """Return the graph of a GGUF file, converted once and cached.

    The conversion runs in its own process, so that its memory does not count as the engine's.
    """
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{ov.get_version()}"
    folder = cache_folder() / f"openvino-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    graph = folder / "openvino_model.xml"
    link = folder / "model.gguf"  # the graph is saved next to the file that was read
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    done = folder / "complete"
    if not done.exists():
        command = [sys.executable, "-c", _CONVERT, os.fspath(link)]
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if run.returncode != 0 or not graph.exists():
            lines = run.stdout.strip().splitlines()[-_SHOWN_LINES:] or ["no message"]
            raise BenchError(f"{path} cannot be converted for OpenVINO: {' / '.join(lines)}")
        done.touch()
    return graph


def _keep_last_token(model: ov.Model) -> None:
    """Restrict the output head to the last position."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    end = np.iinfo(np.int64).max
    start_stop_step_axis = (-1, end, 1, 1)
    bounds = [ops.constant(np.array([value], np.int64)) for value in start_stop_step_axis]
    node.input(0).replace_source_output(ops.slice(node.input_value(0), *bounds).output(0))
    model.validate_nodes_and_infer_types()


class _OpenVino(Adapter):
    """Compiled OpenVINO graph with its state."""

    def __init__(self, options: Options) -> None:
        self._threads = options.threads or available_threads()
        self._device = "CPU" if options.device != "metal" else "GPU"
        core = ov.Core()
        config: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(self._threads),
        }
        if options.compute == "f32":
            config |= {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        if options.kv_dtype == "f32":
            config["KV_CACHE_PRECISION"] = "f32"
        elif options.kv_dtype == "q8_0":
            config["KV_CACHE_PRECISION"] = "u8"
        model = core.read_model(convert(Path(options.path)))
        _keep_last_token(model)
        self._compiled = core.compile_model(model, self._device, config)
        self._request = self._compiled.create_infer_request()
        self._name = str(core.get_property(self._device, "FULL_DEVICE_NAME"))
        self._mask = np.ones((1, options.max_context), np.int64)
        self._beam = np.zeros(1, np.int32)
        self._position = 0

    def identity(self) -> Identity:
        precision = self._compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        cache = self._compiled.get_property("KV_CACHE_PRECISION").get_type_name()
        return Identity(
            build=f"OpenVINO {ov.get_version().split('-')[0]}",
            device=f"{self._device} ({self._name.strip()}, {counted(self._threads, 'thread')})",
            n_threads=self._threads,
            settings=f"{precision} arithmetic, KV {cache}",
        )

    def clear(self) -> None:
        self._request.reset_state()
        self._position = 0

    def prefill(self, ids: Ids) -> None:
        self._run(ids.astype(np.int64)[None])

    def decode(self, ids: Ids) -> None:
        for column in ids.astype(np.int64).reshape(-1, 1, 1):
            self._run(column)

    def _run(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        begin, self._position = self._position, self._position + ids.shape[1]
        inputs = {
            "input_ids": ids,
            "attention_mask": self._mask[:, : self._position],
            "position_ids": np.arange(begin, self._position, dtype=np.int64)[None],
            "beam_idx": self._beam,
        }
        self._request.infer(inputs, share_inputs=True, share_outputs=True)


def load(options: Options) -> Adapter:
    with GGUFFile(Path(options.path)) as gguf:
        causal = read_config(gguf).causal
    if causal:
        return _OpenVino(options)
    from metal_prefill.bench._peers import openvino_encoders

    return openvino_encoders.load(options)
