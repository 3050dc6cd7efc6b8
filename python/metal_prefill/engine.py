"""The engine handle, shared by a model, its sessions, schedulers, tasks and servers; and its opening."""

from __future__ import annotations

import logging
import os
import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from metal_prefill import _core
from metal_prefill._core import ModelConfig
from metal_prefill._support.arguments import integer, one_of
from metal_prefill._support.cached_property import cached_property
from metal_prefill._support.choices import AUTO, DEVICES, Compute, ComputeMode
from metal_prefill.errors import ClosedError, DeviceError, GGUFError, MetalPrefillError, UnsupportedModelError
from metal_prefill.files._gguf_file import TENSOR_TYPES, FloatArray, GGUFFile, as_matrix
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._metadata_keys import LABEL_ENCODER
from metal_prefill.files._model_tensors import collect_tensors
from metal_prefill.files._task_config import PooledHead, Prompts, TextLengths, read_head
from metal_prefill.hub._local_file import default_model_path, local_file, source_name
from metal_prefill.storage import _pack_cache, _session_file
from metal_prefill.storage._cache_folder import PIPELINE_LIMIT, PIPELINES, pipeline_folder, remove_oldest
from metal_prefill.storage._kernel_set import kernel_set, settle_pair_speed

if TYPE_CHECKING:
    from metal_prefill.text._tokenizer import Tokenizer

# Kernel sets on which products of bfloat16 pairs are faster than 8 bits with a scale for each block of 32,
# once quantized weights are converted to pairs.
_FASTER_IN_PAIRS = ("amx",)
# Modes that are faster than float32, by kernel set. Vectors of real encoders are within 1e-4 of float32.
_FASTER_THAN_FLOAT: dict[str, ComputeMode] = {
    "amx": "bf16",
    "avx512bf16": "bf16",
    "avx512vnni": "int16",
    "avxvnni": "int16",
    "avx2": "int16",
}
_ROW_SHARE = 0.12  # share of one row's time that another row adds, until it is measured; a high value would
# prevent longer drafts from being tried

_log = logging.getLogger("metal_prefill")


class RowCost:
    """Measured seconds of passes by their rows, each of which has an output or belongs to a prompt.

    Delays by other programs must not make passes look expensive: an estimate adopts shorter times at once,
    and longer ones slowly.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by number of rows, rounded up

    def note(self, rows: int, seconds: float) -> None:
        """Record the time of a pass."""
        key = _bucket(rows)
        known = self._seconds.get(key)
        if known is None:
            self._seconds[key] = seconds
        else:
            weight = 0.3 if seconds < known else 0.05
            self._seconds[key] = known + weight * (min(seconds, 2 * known) - known)

    def seconds(self, rows: int) -> float:
        """Estimate the time of a pass."""
        key = _bucket(rows)
        if key in self._seconds or not self._seconds:
            return self._seconds.get(key, float(rows))
        known = self._seconds.copy()  # other threads record their passes
        below = max((rows for rows in known if rows < key), default=None)
        above = min((rows for rows in known if rows > key), default=None)
        if below is not None and above is not None:
            share = (key - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        nearest = max(known) if above is None else min(known)
        one = known.get(1, known[nearest] / (1 + _ROW_SHARE * (nearest - 1)))
        return max(known[nearest] + _ROW_SHARE * one * (key - nearest), one)


def _bucket(rows: int) -> int:
    """Round up to a number of rows that is measured: steps of an eighth at least."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


class Engine:
    """A native engine with its file, configuration, tokenizer, limits and measured times.

    Safe to use from several threads.
    """

    def __init__(
        self,
        core: _core.Engine,
        # The file and its contents.
        gguf: GGUFFile,
        config: ModelConfig,
        head: PooledHead,
        max_context: int,  # maximum position of sessions that set none
        compute: ComputeMode | None,  # None on a GPU
        kv_dtype: str,  # ``f16``, ``f32`` or ``q8_0``
        lengths: TextLengths,  # maximum number of tokens of each kind of text
    ) -> None:
        self._core: _core.Engine | None = core
        self.gguf = gguf
        self.config = config
        self.head = head
        self.prompts = Prompts.read(gguf)
        self.max_context = max_context
        self.compute = compute
        self.kv_dtype = kv_dtype
        self.lengths = lengths
        self.row_cost = RowCost()  # of passes, for all texts
        # Maximum number of tokens of a sequence in a pass whose results are bit-identical to those of single
        # tokens.
        self.exact_rows = core.exact_rows
        # Whether the engine submits the pass of the next token before the host has seen the last one.
        self.runs_ahead = core.runs_ahead
        self.label_encoder: Engine | None = None  # second encoder of a file, for labels
        self.label_vectors: dict[str, FloatArray] = {}  # of earlier calls; a new dictionary replaces it

    @property
    def core(self) -> _core.Engine:
        """The native engine.

        Raises
        ------
        ClosedError
            The model is closed.
        """
        core = self._core  # another thread may close the model now
        if core is None:
            raise ClosedError("the model is closed")
        return core

    @property
    def path(self) -> Path:
        """The GGUF file."""
        return self.gguf.path

    @property
    def name(self) -> str:
        """Name of the file, or of the folder that it was converted from."""
        return source_name(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the file, built on first use."""
        from metal_prefill.text._tokenizer import Tokenizer

        return Tokenizer(self.gguf)

    @cached_property
    def state_owner(self) -> _session_file.Owner:
        """Identity of the model in saved sessions."""
        variant = "long contexts" if self.config.rope_long else ""
        return _session_file.Owner(
            self.config,
            self.kv_dtype,
            _session_file.fingerprint(self.gguf, variant),
            f"{self.name} for {variant}" if variant else self.name,
        )

    def session(self, max_context: int | None = None, prefix_namespace: str = "") -> _core.Session:
        """Make a native session; see :meth:`metal_prefill.Model.session`."""
        core, limit = self.core, self.config.context_length
        context = integer("max_context", self.max_context if max_context is None else max_context, 1)
        if context > limit:
            raise ValueError(f"max_context={context} is outside 1 to {limit}, the model's context length")
        if not isinstance(prefix_namespace, str):
            raise TypeError(f"prefix_namespace must be a str, got {type(prefix_namespace).__name__}")
        return core.session(context, prefix_namespace)

    def check_generates(self) -> None:
        """Raise ValueError if the model does not predict text, as encoders do not."""
        if not self.config.generates:
            kind = "an encoder, which does not generate or score text"
            raise ValueError(f"{self.name} is {kind}: use {self.encoder_methods}")

    @property
    def encoder_methods(self) -> str:
        """Methods that suit an encoder, for messages."""
        if self.head.vocabulary_pooling is not None:
            return "`embed_sparse`, or `embed`"
        if self.head.entities is not None:
            return "`find_entities`"
        if not self.head.labels:
            return "`embed`, or `rerank`" if self.head.per_token else "`embed`"
        return "`label_tokens`" if self.head.pooling == "none" else "`rerank` or `classify`"

    def close(self) -> None:
        """Free weights and pools once calls in flight have finished."""
        core, self._core = self._core, None
        if core is not None:
            # So does the destructor, which in free-threaded Python runs in the thread that made `core`.
            core.finish()
        if self.label_encoder is not None:
            self.label_encoder.close()


@runtime_checkable
class EngineOwner(Protocol):
    """An object with an engine, such as a :class:`metal_prefill.Model`."""

    @property
    def engine(self) -> Engine:
        """The engine handle."""


def resolve_device(device: str) -> str:
    """Return ``cpu`` or ``metal`` for a requested device; ``METAL_PREFILL_DEVICE`` overrides it.

    ``auto`` is ``metal`` on a Mac's GPU and ``cpu`` everywhere else. The emulator is used only if ``metal``
    is requested.

    Raises
    ------
    ValueError
        The name is not one of ``auto``, ``cpu`` and ``metal``.
    DeviceError
        ``metal`` is requested, but not available.
    """
    override = os.environ.get("METAL_PREFILL_DEVICE")
    source = "METAL_PREFILL_DEVICE" if override else "device"
    name: str = one_of(source, override or device, DEVICES)
    if name == AUTO:
        if _core.metal_available() and not _core.has_emulator:
            return "metal"
        announce_fallback()
        return "cpu"
    if name == "metal" and (problem := _core.metal_device().get("problem")):
        raise DeviceError(f"{source}='metal' is not available: {problem}")
    return name


def open_engine(
    path: str | os.PathLike[str] | None,
    device: str,
    options: _core.EngineOptions,
    *,
    max_context: int | None,
    compute: Compute,
    kv_dtype: str,
    mmap: bool,
    pack_cache: bool,
    adapter: str | os.PathLike[str] | None,
) -> Engine:
    """Open a file on the engine of a device; parameters and errors are those of :class:`Model`.

    `options` are checked, and complete except for those that depend on the file and the device.
    """
    automatic = (os.environ.get("METAL_PREFILL_DEVICE") or device) == AUTO
    device = resolve_device(device)
    if device == "metal":
        options.metal.pipeline_folder = pipeline_folder(_core.has_emulator)
        if os.environ.get("METAL_PREFILL_MATMUL_TENSOR") == "0":
            options.metal.no_matmul_tensor = "METAL_PREFILL_MATMUL_TENSOR is 0"
    file = local_file(default_model_path() if path is None else path, adapter)

    def opened(gguf: GGUFFile, limit: int | None) -> Engine:
        config = read_config(gguf, limit)
        options.max_context = 0 if limit is None else min(limit, config.context_length)
        head = read_head(gguf, config.architecture, config.dim)
        try:
            builder = _core.ModelBuilder(config, gguf.mapping, gguf.mapping)
            for role, layer, info in collect_tensors(gguf, config):
                builder.add(
                    role, layer, info.name, info.type, *as_matrix(info.shape), info.offset, info.nbytes
                )
            settle_pair_speed()
            if device == "cpu":
                announce_slow_kernels()
            core = _gpu_engine(builder, options, config, gguf, automatic) if device == "metal" else None
            mode: ComputeMode | None = None
            if core is None:
                mode = chosen_mode(gguf, config) if compute == AUTO else compute
                options.compute = mode
                core = (
                    _pack_cache.build(builder, options, gguf) if pack_cache else builder.build("cpu", options)
                )
        except MetalPrefillError:
            raise
        except ValueError as error:  # the options were checked, so the cause is in the file
            raise GGUFError(f"{gguf.path}: {error}") from None
        lengths = TextLengths.read(gguf) if limit is None else TextLengths()
        context = lengths.longest(config.context_length) if limit is None else limit
        return Engine(core, gguf, config, head, context, mode, kv_dtype, lengths)

    engine = opened(GGUFFile(file, mmap=mmap), max_context)
    if engine.head.entities is not None and engine.head.entities.label_tokens is None:
        engine.label_encoder = opened(engine.gguf.inner(LABEL_ENCODER), None)
    return engine


def chosen_mode(gguf: GGUFFile, config: ModelConfig) -> ComputeMode:
    """Return the mode that ``compute="auto"`` selects on this processor.

    It is the fastest mode, except for K-quants, IQ2, IQ3 and IQ4_XS on AMX, that is at least as close to
    float32 as 8 bits, or within 1e-4 (1 - cosine) for encoders without quantized weights. Causal models may
    generate: their quantized weights stay in 8 bits or fewer, since a single token is bound by reading them,
    and ``"int8"`` multiplies other weights in float32.
    """
    quantized = any(
        TENSOR_TYPES[tensor.type].block_values > 1
        for tensor in gguf.tensors.values()
        if tensor.name.startswith("blk.")
    )
    if config.causal:
        return "int8"
    if quantized:
        return "bf16" if kernel_set() in _FASTER_IN_PAIRS else "int8"
    return _FASTER_THAN_FLOAT.get(kernel_set(), "int8")


@cache
def announce_fallback() -> None:
    """Log once that the CPU is used."""
    level = logging.WARNING if platform.system() == "Darwin" else logging.INFO
    _log.log(level, "no Metal device: using the CPU engine")


@cache
def announce_slow_kernels() -> None:
    """Log once that the processor supports none of the vector kernels, unless they were switched off."""
    if os.environ.get("METAL_PREFILL_CPU_ISA") or _core.kernel_sets() != ["scalar"]:
        return
    built = [name for name in _core.built_sets() if name != "scalar"]
    if built:
        why = f"this processor runs none of {', '.join(built)}"
    else:
        why = "this build has no others: `pip install -v` with a newer compiler shows why"
    _log.warning("using scalar kernels, which are many times slower: %s", why)


def _gpu_engine(
    builder: _core.ModelBuilder,
    options: _core.EngineOptions,
    config: ModelConfig,
    gguf: GGUFFile,
    automatic: bool,
) -> _core.Engine | None:
    """Build the Metal engine; None if it cannot be used and the device was not requested by name."""
    from metal_prefill.gpu import _self_test

    try:
        engine = _self_test.build_checked(builder, options, config, len(gguf.mapping))
        if options.metal.pipeline_folder:
            remove_oldest(PIPELINES, PIPELINE_LIMIT)
        return engine
    except (DeviceError, UnsupportedModelError) as error:
        if not automatic:
            raise
        _log.warning("using the CPU engine: %s", error)
        return None
