"""llama.cpp, through the low-level calls of llama-cpp-python, as docs/benchmarking.md describes.

The high-level class would copy logits into Python and evaluate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp as llama
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from metal_prefill._support.messages import counted
from metal_prefill.bench._cases import SAMPLING, Choice
from metal_prefill.bench._engines import Adapter, BenchError, Identity, Ids, Options, Vectors
from metal_prefill.bench._machine import available_threads, cpu_name

GGML_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # of the KV cache, by kv_dtype
# Build features of llama.cpp that determine the speed of its products, best first.
FEATURES = ("AMX_INT8", "AVX512_VNNI", "AVX_VNNI", "AVX512", "AVX2", "SVE", "MATMUL_INT8", "DOTPROD", "NEON")
ALL_LAYERS = 999  # number of the model's layers on the GPU
MOST_ROWS = 1024  # rows of a batch of several sequences, unless there are more sequences
FLASH_ATTENTION_ON = 1
# Tokens of a batch of texts. llama-embedding takes 2048, but every token is multiplied with the keys of the
# whole batch, and with 512 the same texts took 0.88 of the time.
EMBEDDING_ROWS, MOST_SEQUENCES = 512, 64
PENALTY_WINDOW = 64  # tokens, as in metal_prefill
GUESSES_CPU, GUESSES_GPU = 2, 10  # drafts of a pass, as llama-cpp-python's README recommends


def _best_feature() -> str:
    built_with = llama.llama_print_system_info().decode()
    return next((name for name in FEATURES if f"{name} = 1" in built_with), "scalar")


def _opened(model: Any, threads: int, what: str, **settings: Any) -> Any:
    """Create a context, which `what` describes in an error."""
    params = llama.llama_context_default_params()
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = FLASH_ATTENTION_ON
    for name, value in settings.items():
        setattr(params, name, value)
    if not (context := llama.llama_init_from_model(model, params)):
        raise BenchError(f"llama.cpp cannot create a context {what}")
    return context


class _Context:
    """llama.cpp context for several sequences, with a reusable batch."""

    def __init__(
        self, model: Any, options: Options, threads: int, sequences: int, positions: int, rows: int
    ) -> None:
        self._context = _opened(
            model,
            threads,
            f"of {sequences} sequences of {positions} positions",
            n_ctx=sequences * positions,
            n_seq_max=sequences,
            kv_unified=False,
            **dict.fromkeys(("n_batch", "n_ubatch"), rows),
            **dict.fromkeys(("type_k", "type_v"), GGML_TYPES[options.kv_dtype]),
        )
        self._memory = llama.llama_get_memory(self._context)
        self._sequences = sequences
        self._rows = rows
        self._batch = llama.llama_batch_init(rows, 0, 1)
        # The batch's arrays are C memory, filled through views: a Python loop would add to the measured time.
        view = np.ctypeslib.as_array
        self._token, self._pos = view(self._batch.token, (rows,)), view(self._batch.pos, (rows,))
        self._logits = view(self._batch.logits, (rows,))
        view(self._batch.n_seq_id, (rows,))[:] = 1
        # Each row has a pointer to its sequences, which requires a loop; it is not timed.
        self._seq_id = [view(self._batch.seq_id[i], (1,)) for i in range(rows)]
        self._arranged = (0, False)
        self.clear()

    def clear(self) -> None:
        llama.llama_memory_clear(self._memory, False)
        self._position = 0

    def _arrange(self, n: int, every: bool) -> None:
        """Set the sequence of each row, and the rows that need logits, for `n` tokens of each sequence."""
        if (n, every) != self._arranged:
            for row in range(self._sequences * n):
                self._seq_id[row][0] = row // n
                self._logits[row] = every or row % n == n - 1
            self._arranged = (n, every)

    def run(self, ids: Ids) -> None:
        """Append tokens, ``[sequences, n]``, and compute the logits of the last of each sequence.

        If they exceed a batch they are split, with logits for the last token of each part.
        """
        step = self._rows // self._sequences
        for begin in range(0, ids.shape[1], step):
            self._run(ids[:, begin : begin + step])

    def _run(self, ids: Ids, every: bool = False) -> None:
        sequences, n = ids.shape
        self._arrange(n, every)
        self._batch.n_tokens = ids.size
        self._token[: ids.size] = ids.ravel()
        self._pos[: ids.size].reshape(sequences, n)[:] = np.arange(self._position, self._position + n)
        status = llama.llama_decode(self._context, self._batch)
        if status != 0:
            raise BenchError(f"llama_decode failed with status {status} at position {self._position}")
        llama.llama_synchronize(self._context)
        self._position += n

    def check(self, ids: Ids) -> None:
        """Append tokens, ``[n]``, of the only sequence, and compute the logits after each."""
        self._run(ids[None], every=True)

    def rewind(self, count: int) -> None:
        """Remove the last tokens of the only sequence."""
        self._position -= count
        llama.llama_memory_seq_rm(self._memory, 0, self._position, -1)

    def sample(self, sampler: Any, row: int) -> int:
        """Choose a token by the logits of a row of the last batch."""
        return int(llama.llama_sampler_sample(sampler, self._context, row))

    def logits(self, row: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits of a row of the last batch, ``[vocab_size]``."""
        model = llama.llama_get_model(self._context)
        size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        return np.array(np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, row), (size,)))

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)


class _Embedder:
    """Embedder like llama.cpp's llama-embedding, with smaller batches.

    Each batch is one micro-batch of whole texts with a shared cache. A text must not be longer than a batch.
    """

    def __init__(self, model: Any, threads: int) -> None:
        rows = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), EMBEDDING_ROWS)
        settings = {"n_seq_max": MOST_SEQUENCES, "kv_unified": True, "embeddings": True}
        self._context = _opened(model, threads, "for embeddings", **rows, **settings)
        self._width = llama.llama_model_n_embd(model)
        self._batch = llama.llama_batch_init(EMBEDDING_ROWS, 0, 1)

    def __call__(self, texts: Sequence[Ids]) -> Vectors:
        """Return the vectors, normalized, ``[texts, dim]``."""
        vectors: list[Any] = []
        group: list[Ids] = []
        for text in texts:
            full = sum(map(len, group)) + len(text) > EMBEDDING_ROWS or len(group) == MOST_SEQUENCES
            if group and full:
                vectors += self._run(group)
                group = []
            group.append(text)
        return np.array(vectors + self._run(group), np.float32)

    def _run(self, texts: Sequence[Ids]) -> list[Any]:
        batch, row = self._batch, 0
        for sequence, text in enumerate(texts):
            for position, token in enumerate(text.tolist()):
                batch.token[row], batch.pos[row], batch.logits[row] = token, position, True
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                row += 1
        batch.n_tokens = row
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        status = llama.llama_decode(self._context, batch)
        if status != 0:
            raise BenchError(f"llama_decode failed with status {status} for {len(texts)} texts")
        vectors = []
        for sequence in range(len(texts)):
            pooled = np.ctypeslib.as_array(
                llama.llama_get_embeddings_seq(self._context, sequence), (self._width,)
            )
            vectors.append(pooled / np.linalg.norm(pooled))
        return vectors


class _LlamaCpp(Adapter):
    """llama.cpp model, with a context for one sequence and one for several."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._threads = options.threads or available_threads()
        self._gpu = options.device != "cpu" and bool(llama.llama_supports_gpu_offload())
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = ALL_LAYERS if self._gpu else 0
        self._model = llama.llama_model_load_from_file(options.path.encode(), model_params)
        if not self._model:
            raise BenchError(f"llama.cpp cannot load {options.path}")
        self._single = self._open(1, options.max_context, max(options.max_prompt, 32))
        self._streams: _Context | None = None
        self._embedder: _Embedder | None = None
        self._shape = (0, 0)  # sequences and positions of `_streams`

    def _open(self, sequences: int, positions: int, rows: int) -> _Context:
        return _Context(self._model, self._options, self._threads, sequences, positions, rows)

    def identity(self) -> Identity:
        return Identity(
            build=f"llama.cpp (llama-cpp-python {llama.__version__})",
            device="GPU" if self._gpu else f"CPU ({cpu_name()}, {counted(self._threads, 'thread')})",
            n_threads=self._threads,
            settings=f"{_best_feature()}, flash attention, KV {self._options.kv_dtype}, one micro-batch",
        )

    def clear(self) -> None:
        self._single.clear()

    def prefill(self, ids: Ids) -> None:
        self._single.run(ids[None])

    def decode(self, ids: Ids) -> None:
        for token in ids.reshape(-1, 1, 1):
            self._single.run(token)

    def open_streams(self, count: int, context: int) -> None:
        if self._streams is None or self._shape != (count, context):
            if self._streams is not None:
                self._streams.close()
            self._streams = self._open(count, context, max(count, min(count * context, MOST_ROWS)))
            self._shape = (count, context)
        self._streams.clear()

    def prefill_streams(self, ids: Ids) -> None:
        assert self._streams is not None
        self._streams.run(ids)

    def decode_streams(self, ids: Ids) -> None:
        assert self._streams is not None
        for column in ids.T.reshape(ids.shape[1], ids.shape[0], 1):
            self._streams.run(column)

    def choose(self, ids: Ids, count: int, choice: Choice) -> list[int]:
        # A pass accepts drafts up to the first mismatch.
        sampler = self._sampler(choice)
        for token in ids.tolist():
            llama.llama_sampler_accept(sampler, token)
        find = LlamaPromptLookupDecoding(num_pred_tokens=GUESSES_GPU if self._gpu else GUESSES_CPU)
        text, made = ids.astype(np.intc), 0
        while made < count:
            drafts = find(text)[: count - made - 1] if choice == "lookup" else text[:0]
            self._single.check(np.concatenate([text[-1:], drafts]))
            for row in range(len(drafts) + 1):
                token = self._single.sample(sampler, row)
                text, made = np.append(text, np.intc(token)), made + 1
                if row < len(drafts) and token != drafts[row]:
                    self._single.rewind(len(drafts) - row)
                    break
        llama.llama_sampler_free(sampler)
        return [int(token) for token in text[len(ids) :]]

    def _sampler(self, choice: Choice) -> Any:
        """Create a sampler chain that excludes tokens that end a text."""
        vocab = llama.llama_model_get_vocab(self._model)
        size = llama.llama_vocab_n_tokens(vocab)
        ends = [token for token in range(size) if llama.llama_vocab_is_eog(vocab, token)]
        biases = (llama.llama_logit_bias * len(ends))(*[(token, -float("inf")) for token in ends])
        links = [llama.llama_sampler_init_logit_bias(size, len(ends), biases)]
        if choice == "sampled":
            links += [
                llama.llama_sampler_init_penalties(
                    size, PENALTY_WINDOW, SAMPLING["repeat_penalty"], 0.0, 0.0
                ),
                llama.llama_sampler_init_top_k(int(SAMPLING["top_k"])),
                llama.llama_sampler_init_top_p(SAMPLING["top_p"], 1),
                llama.llama_sampler_init_temp(SAMPLING["temperature"]),
                llama.llama_sampler_init_dist(int(SAMPLING["seed"])),
            ]
        else:
            links.append(llama.llama_sampler_init_greedy())
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for link in links:
            llama.llama_sampler_chain_add(chain, link)
        return chain

    def embed(self, texts: list[Ids]) -> Vectors:
        if self._embedder is None:
            self._embedder = _Embedder(self._model, self._threads)
        return self._embedder(texts)


load = _LlamaCpp
