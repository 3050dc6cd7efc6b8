"""llama.cpp, through the low-level calls of llama-cpp-python.

At its best for this comparison: flash attention, the whole prompt in one micro-batch, weights repacked at
load (its default where the CPU has the instructions), logits for the last token only. The high-level class
would copy logits into Python and evaluate them; the C calls below are what llama.cpp's own llama-bench makes.
"""

from __future__ import annotations

import llama_cpp as llama
import numpy as np

from metal_prefill._bench.engines import Engine, Identity, Ids, Options
from metal_prefill._bench.errors import BenchError
from metal_prefill._bench.machine import available_threads, counted, cpu_name

GGML_TYPE_F32, GGML_TYPE_F16 = 0, 1
ALL_LAYERS = 999
# Of what llama.cpp says it was built with, what decides the speed of its products; the best comes first.
FEATURES = ("AMX_INT8", "AVX512_VNNI", "AVX_VNNI", "AVX512", "AVX2", "SVE", "MATMUL_INT8", "DOTPROD", "NEON")
FLASH_ATTENTION_ON = 1


def _best_feature() -> str:
    built_with = llama.llama_print_system_info().decode()
    return next((name for name in FEATURES if f"{name} = 1" in built_with), "scalar")


class LlamaCpp(Engine):
    """A llama.cpp context."""

    def __init__(self, options: Options) -> None:
        self._threads = options.threads or available_threads()
        self._gpu = options.device != "cpu" and bool(llama.llama_supports_gpu_offload())
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = ALL_LAYERS if self._gpu else 0
        self._model = llama.llama_model_load_from_file(options.path.encode(), model_params)
        if not self._model:
            raise BenchError(f"llama.cpp cannot load {options.path}")
        params = llama.llama_context_default_params()
        params.n_ctx = options.max_context
        params.n_batch = params.n_ubatch = max(options.max_prompt, 32)
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.type_k = params.type_v = GGML_TYPE_F32 if options.kv_dtype == "f32" else GGML_TYPE_F16
        self._kv = options.kv_dtype
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise BenchError(f"llama.cpp cannot make a context of {options.max_context} positions")
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._position = 0

    def identity(self) -> Identity:
        """Say what this is and how it runs."""
        return Identity(
            build=f"llama.cpp (llama-cpp-python {llama.__version__})",
            device="GPU" if self._gpu else f"CPU ({cpu_name()}, {counted(self._threads, 'thread')})",
            threads=self._threads,
            settings=f"{_best_feature()}, flash attention, KV {self._kv}, one micro-batch",
        )

    def clear(self) -> None:
        """Empty the context."""
        llama.llama_memory_clear(self._memory, False)
        self._position = 0

    def prefill(self, ids: Ids) -> None:
        """Append a prompt and compute the logits of its last token."""
        count, batch = len(ids), self._batch
        batch.n_tokens = count
        # The batch's arrays are C memory: filled through views, since a loop in Python would be timed too.
        np.ctypeslib.as_array(batch.token, (count,))[:] = ids
        np.ctypeslib.as_array(batch.pos, (count,))[:] = np.arange(self._position, self._position + count)
        np.ctypeslib.as_array(batch.n_seq_id, (count,))[:] = 1
        for i in range(count):
            batch.seq_id[i][0] = 0
        logits = np.ctypeslib.as_array(batch.logits, (count,))
        logits[:] = 0
        logits[-1] = 1
        self._run()

    def decode(self, ids: Ids) -> None:
        """Append tokens one at a time, computing logits after each."""
        batch = self._batch
        batch.n_tokens = 1
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
        for token in ids.tolist():
            batch.token[0], batch.pos[0] = token, self._position
            self._run()

    def _run(self) -> None:
        status = llama.llama_decode(self._context, self._batch)
        if status != 0:
            raise BenchError(f"llama_decode failed with status {status} at position {self._position}")
        llama.llama_synchronize(self._context)
        self._position += self._batch.n_tokens


def load(options: Options) -> Engine:
    """Load the model."""
    return LlamaCpp(options)
