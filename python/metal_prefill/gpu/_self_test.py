"""The quick check of a GPU, made once where a device, an OS and a version of the package meet.

A model that is opened on a GPU runs a few tokens, and each kernel of the first layer is compared with
float64. The result is kept in the user's cache folder, for the device, the build of the OS, the version of
the package, the kernels that the model needs and the size of its file: a GPU may read the first layer of a
small file, and not that of a large one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metal_prefill import _core
from metal_prefill._support.atomic_write import replacing
from metal_prefill._support.cache_folder import cache_folder, cache_key
from metal_prefill.errors import DeviceError
from metal_prefill.gpu._kernel_checks import Difference, difference

if TYPE_CHECKING:
    from metal_prefill.files._architecture import ModelConfig

_log = logging.getLogger("metal_prefill")

# Kernels for many tokens, for one, and for a few.
QUICK = (9, 1, 2)
_SIZE_CLASS = 1 << 30  # bytes of files that share a result; some GPUs misread those of 2.5 GB or more
_ON_TENSORS = "matmul_tensor_"  # how the names of kernels begin that an engine can do without


def known_tokens(n: int, vocab_size: int, first: int = 0) -> NDArray[np.int32]:
    """Return n token ids, those of positions from `first` on, the same every time."""
    return ((5 + 7 * np.arange(first, first + n)) % vocab_size).astype(np.int32)


def kernel_differences(
    session: _core.Session, config: ModelConfig, lengths: Sequence[int]
) -> tuple[set[str], list[Difference]]:
    """Run prompts one after another; return the kernels that were checked, and what differs, one for each.

    Parameters
    ----------
    session
        Its tokens change.
    config
        Of the model. Where its tokens see both ways, each prompt begins anew.
    lengths
        Of the prompts. Those that leave the context are left out.
    """
    inspector = session.inspector()
    assert inspector is not None, "an engine that makes dispatches"
    checked: set[str] = set()
    found: dict[str, Difference] = {}
    for n in lengths:
        if not config.causal:
            session.rewind(0)
        if session.position + n > session.max_context:
            continue
        tokens = known_tokens(n, config.vocab_size, session.position)
        for dispatch in inspector.trace(tokens, contents=True)[1]:
            # Beyond the first layer nothing was kept.
            if dispatch.layer > 0 or dispatch.kernel in found:
                continue
            checked.add(dispatch.kernel)
            if (wrong := difference(dispatch)) is not None:
                found[dispatch.kernel] = wrong
    return checked, list(found.values())


def _wanted() -> bool:
    """Whether to check: on real GPUs; ``METAL_PREFILL_CHECK`` says otherwise by 0, or 1 for the emulator."""
    setting = os.environ.get("METAL_PREFILL_CHECK", "")
    return setting == "1" or (setting != "0" and not _core.has_emulator)


def _read(path: Path) -> dict[str, list[str]]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, or damaged: the check is made again
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, known: dict[str, list[str]]) -> None:
    with suppress(OSError):  # no cache: the next process checks again
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps(known), encoding="utf-8")


def _findings(engine: _core.Engine, config: ModelConfig, file_bytes: int) -> list[str]:
    """Make the quick check of an engine on a GPU, or read what it found earlier: what is wrong."""
    session = engine.session(0)
    inspector = session.inspector()
    if inspector is None:
        return []
    path = cache_folder() / "first_contact.json"
    kernels = sorted(pipeline.kernel for pipeline in inspector.pipelines())
    key = cache_key([engine.device_name, kernels, file_bytes // _SIZE_CLASS])
    known = _read(path)
    if key not in known:
        known[key] = [str(wrong) for wrong in kernel_differences(session, config, QUICK)[1]]
        _write(path, known)
    return known[key]


def build_checked(
    builder: _core.ModelBuilder, options: _core.EngineOptions, config: ModelConfig, file_bytes: int
) -> _core.Engine:
    """Build an engine on a GPU that passes the quick check.

    Where kernels on tensors alone are wrong, one that does without them.

    Parameters
    ----------
    builder, options, config
        Of the model.
    file_bytes
        Size of its file.

    Raises
    ------
    DeviceError
        Naming the kernels that are wrong.
    """
    engine = builder.build("metal", options)
    if not _wanted():
        return engine
    wrong = _findings(engine, config, file_bytes)
    if wrong and all(text.startswith(_ON_TENSORS) for text in wrong):
        options.metal.no_matmul_tensor = "; ".join(wrong)
        _log.warning("matrix units are not used, since what they compute is wrong: %s", "; ".join(wrong))
        engine = builder.build("metal", options)
        wrong = _findings(engine, config, file_bytes)
    if wrong:
        raise DeviceError(
            f"the GPU '{engine.device_name}' computes wrong results: {'; '.join(wrong)}. Please report "
            "what `metal-prefill doctor` says; use device='cpu'"
        )
    return engine
