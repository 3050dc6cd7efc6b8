"""Open a GGUF file on an engine."""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import Literal

from metal_prefill import _core
from metal_prefill._engine import Engine
from metal_prefill._support.cache_folder import pipeline_folder, remove_old_pipelines
from metal_prefill._support.pair_speed import settle_pair_speed
from metal_prefill.conversion._local_file import local_file
from metal_prefill.errors import DeviceError, GGUFError, MetalPrefillError
from metal_prefill.files import _pack_cache
from metal_prefill.files._compute_mode import AUTO, ComputeMode, chosen_mode, core_mode
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._hyperparameters import read_config
from metal_prefill.files._model_config import ModelConfig, core_config
from metal_prefill.files._model_tensors import collect_tensors
from metal_prefill.files._pooled_head import read_head
from metal_prefill.files._text_lengths import TextLengths

_log = logging.getLogger("metal_prefill")
_announced_fallback = False
_announced_slow_kernels = False


def default_model_path() -> Path:
    """Return the path of the small model that is bundled with the package."""
    from importlib import resources

    data = resources.files("metal_prefill") / "data"
    return Path(str(next(f for f in data.iterdir() if f.name.endswith(".gguf"))))


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


def open_engine(
    path: str | os.PathLike[str] | None,
    device: str,
    options: _core.EngineOptions,
    *,
    max_context: int | None,
    compute: ComputeMode | Literal["auto"],
    kv_dtype: str,
    mmap: bool,
    pack_cache: bool,
) -> Engine:
    """Open a file on the engine of a device; parameters and errors are those of :class:`Model`.

    `options` are checked, and complete but for those that depend on the file and the device.
    """
    automatic = (os.environ.get("METAL_PREFILL_DEVICE") or device) == "auto"
    device = resolve_device(device)
    if device == "metal":
        options.metal.pipeline_folder = pipeline_folder(_core.has_emulator)
        if os.environ.get("METAL_PREFILL_MATMUL_TENSOR") == "0":
            options.metal.no_matmul_tensor = "METAL_PREFILL_MATMUL_TENSOR is 0"
    gguf = GGUFFile(default_model_path() if path is None else local_file(path), mmap=mmap)
    config = read_config(gguf, max_context)
    if max_context is not None:
        options.max_context = min(max_context, config.context_length)
    head = read_head(gguf, config.architecture, config.dim)
    try:
        builder = _core.ModelBuilder(core_config(config), gguf.mapping, gguf.mapping)
        for role, layer, info in collect_tensors(gguf, config):
            rows, cols = info.shape if len(info.shape) == 2 else (1, info.shape[0])
            builder.add(role, layer, info.name, info.type, rows, cols, info.offset, info.nbytes)
        settle_pair_speed()
        if device == "cpu":
            _announce_slow_kernels()
        core = _gpu_engine(builder, options, config, gguf, automatic) if device == "metal" else None
        mode: ComputeMode | None = None
        if core is None:
            mode = chosen_mode(gguf, config) if compute == AUTO else compute
            options.compute = core_mode(mode)
            core = _pack_cache.build(builder, options, gguf) if pack_cache else builder.build("cpu", options)
    except MetalPrefillError:
        raise
    except ValueError as error:  # the options were checked, so the file is at fault
        raise GGUFError(f"{gguf.path}: {error}") from None
    lengths = TextLengths.read(gguf) if max_context is None else TextLengths()
    context = lengths.longest(config.context_length) if max_context is None else max_context
    return Engine(core, gguf, config, head, context, mode, kv_dtype, lengths)


def _announce_slow_kernels() -> None:
    """Log once that the processor runs none of the vector kernels, unless they were switched off."""
    global _announced_slow_kernels
    if (
        _announced_slow_kernels
        or os.environ.get("METAL_PREFILL_CPU_ISA")
        or _core.cpu.kernel_sets() != ["scalar"]
    ):
        return
    _announced_slow_kernels = True
    built = [name for name in _core.cpu.built_sets() if name != "scalar"]
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
        remove_old_pipelines(options.metal.pipeline_folder)
        return engine
    except DeviceError as error:
        if not automatic:
            raise
        _log.warning("using the CPU engine: %s", error)
        return None
