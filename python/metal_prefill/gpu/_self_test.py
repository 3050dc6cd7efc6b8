"""Self-test of a GPU, which runs once for each combination of device, OS and package version.

When a model is opened on a GPU, it processes a few tokens, and one dispatch of each kernel and each set of
its arguments is compared with float64. Then whole passes are compared with their dispatches run one by one.
The result is stored in the user's cache folder by device, OS build, package version, required kernels and
size class of the model file, because some GPUs misread large files only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metal_prefill import _core
from metal_prefill.errors import DeviceError, NumericalError
from metal_prefill.gpu import _fastest_decode
from metal_prefill.gpu._kernel_checks import Difference, difference
from metal_prefill.gpu._trace import from_core
from metal_prefill.storage._cache_folder import cache_folder, cache_key, read_known, write_known

if TYPE_CHECKING:
    from metal_prefill._core import ModelConfig

_log = logging.getLogger("metal_prefill")

# Prompt lengths that select the kernels for many tokens, for one token, and for a few.
QUICK = (9, 1, 2)
# also the length that selects each kind of tiles on matrix units
_TALL = _core.shader_constants["MATMUL_TALL_TOKENS"] + 2
_AHEAD = 4  # tokens
# Bytes. Files in the same class share a result, as some GPUs misread files of 2.5 GB or more.
_SIZE_CLASS = 1 << 30
# Kernels that an engine can replace, by the start of a finding.
_ON_TENSORS = re.compile(r"(?:matmul|attention)_tensor_\w+")


def known_tokens(n: int, vocab_size: int, first: int = 0) -> NDArray[np.int32]:
    """Return n deterministic token ids for the positions from `first` on."""
    return ((5 + 7 * np.arange(first, first + n)) % vocab_size).astype(np.int32)


def kernel_differences(
    session: _core.Session, config: ModelConfig, lengths: Sequence[int]
) -> tuple[set[str], list[Difference]]:
    """Run prompts in sequence; return the checked kernels, and one difference per faulty kernel.

    Without causal attention, each prompt starts from an empty session. Prompts that exceed the context are
    skipped.
    """
    inspector = session.inspector()
    assert inspector is not None, "requires an engine with dispatches"
    checked: set[str] = set()
    kinds: set[str] = set()  # of dispatches, equal in layers of the same kind
    found: dict[str, Difference] = {}
    for n in lengths:
        if not config.causal:
            session.rewind(0)
        if session.position + n > session.max_context:
            continue
        tokens = known_tokens(n, config.vocab_size, session.position)
        new: set[int] = set()
        for i, d in enumerate(from_core(inspector.plan(n))):
            kind = f"{d.kernel} {d.args} {d.grid} {d.runs}"
            if kind not in kinds:
                kinds.add(kind)
                new.add(i)
        if not new:  # the same length again, of an encoder
            continue
        dispatches = inspector.trace(tokens, contents=new)[1]
        for dispatch in (dispatches[i] for i in sorted(new)):
            if dispatch.kernel in found:
                continue
            checked.add(dispatch.kernel)
            if (wrong := difference(dispatch)) is not None:
                found[dispatch.kernel] = wrong
    return checked, list(found.values())


def order_differences(engine: _core.Engine, config: ModelConfig) -> list[str]:
    """Compare passes with their dispatches run one by one; return the differences.

    A driver may order the dispatches of a pass, or passes, wrongly, which single dispatches do not show.
    """
    alone, session = engine.session(0), engine.session(0)
    inspector = alone.inspector()
    assert inspector is not None, "requires an engine with dispatches"
    token = -1

    def run(tokens: NDArray[np.int32], continues: bool = False) -> bool:
        """Return whether both choose the same token, or have the same state of the last."""
        nonlocal token
        # The last dispatch of an encoder has the result.
        kept: set[int] = set() if config.has_head else {len(inspector.plan(len(tokens))) - 1}
        token, dispatches = inspector.trace(tokens, contents=kept)
        if config.has_head:
            return bool(_core.Request.greedy(session, tokens, continues=continues).run() == [token])
        last = dispatches[-1]
        expected = np.asarray(last.after(last.buffers.index("hidden"))).view(np.float32)
        return np.array_equal(_core.Request.hidden(session, tokens).run(), expected[: config.dim])

    for n in QUICK:
        if not config.causal:
            alone.rewind(0)
            session.rewind(0)
        if alone.position + n > alone.max_context:
            continue
        if not run(known_tokens(n, config.vocab_size, alone.position)):
            return [f"a pass of {n} tokens differs from its dispatches one by one"]
    if not config.has_head or not config.causal:
        return []
    for _ in range(min(_AHEAD, alone.max_context - alone.position - 1)):
        if not run(np.array([token], np.int32), continues=True):
            return ["a pass that was sent ahead differs from its dispatches one by one"]
    if alone.position < alone.max_context:
        logits = [_core.Request.logits(s, np.array([token], np.int32)).run() for s in (session, alone)]
        if logits[0].tobytes() != logits[1].tobytes():
            return ["logits after passes differ from those after their dispatches one by one"]
    return []


def _findings(engine: _core.Engine, config: ModelConfig, file_bytes: int) -> list[str]:
    """Return the errors found by the self-test, which runs unless a stored result exists."""
    session = engine.session(0)
    inspector = session.inspector()
    if inspector is None:
        return []
    path = cache_folder() / "first_contact.json"
    kernels = sorted(pipeline.kernel for pipeline in inspector.pipelines())
    key = cache_key([engine.device_name, kernels, file_bytes // _SIZE_CLASS])
    known = read_known(path)
    if key not in known:
        lengths = (*QUICK, _TALL) if any(map(_ON_TENSORS.match, kernels)) else QUICK
        try:
            wrong = [str(difference) for difference in kernel_differences(session, config, lengths)[1]]
            known[key] = wrong or order_differences(engine, config)
        except NumericalError as error:  # not stored, since the file may be the cause
            return [str(error)]
        except DeviceError as error:
            if failed := _ON_TENSORS.search(str(error)):
                return [f"{failed[0]}: {error}"]
            raise
        write_known(path, known)
    return known[key]


def build_checked(
    # Builder, engine options and configuration of the model.
    builder: _core.ModelBuilder,
    options: _core.EngineOptions,
    config: ModelConfig,
    file_bytes: int,  # size of the model file
) -> _core.Engine:
    """Build a GPU engine that passes the self-test.

    If only kernels that use matrix units are faulty, the engine omits all kernels of the same purpose:
    tall tiles, attention, or products and all others. Then the fastest way to decode is selected. Raises
    DeviceError, which names them, if other kernels are faulty.
    """
    if not _fastest_decode.is_wanted("METAL_PREFILL_CHECK"):
        return builder.build("metal", options)
    options.metal.share_kernels()
    try:
        engine = builder.build("metal", options)
        wrong = _findings(engine, config, file_bytes)
        while wrong and all(map(_ON_TENSORS.match, wrong)) and _exclude(wrong, options.metal):
            _log.warning("kernels on matrix units are disabled because they are wrong: %s", "; ".join(wrong))
            engine = builder.build("metal", options)
            wrong = _findings(engine, config, file_bytes)
        if wrong:
            raise DeviceError(
                f"the GPU '{engine.device_name}' computes wrong results: {'; '.join(wrong)}. Please report "
                "the output of `metal-prefill doctor`; use device='cpu' until it is fixed"
            )
        return _with_fastest_decode(engine, builder, options, config, file_bytes)
    finally:
        options.metal.end_sharing()


def _exclude(wrong: list[str], options: _core.MetalOptions) -> bool:
    """Exclude kernels that use matrix units, by their findings; return whether they were used."""
    before = options.attention_tensor, options.tall_tiles, options.no_matmul_tensor
    for text in wrong:
        kernel = text.partition(":")[0]
        if kernel.startswith("attention"):
            options.attention_tensor = False
        elif kernel.endswith("_tall"):
            options.tall_tiles = False
        else:
            options.no_matmul_tensor = "; ".join(wrong)
    return before != (options.attention_tensor, options.tall_tiles, options.no_matmul_tensor)


def _with_fastest_decode(
    engine: _core.Engine,
    builder: _core.ModelBuilder,
    options: _core.EngineOptions,
    config: ModelConfig,
    file_bytes: int,
) -> _core.Engine:
    """Return the engine, or one that decodes faster and passes the self-test, too."""
    choice = None
    if _fastest_decode.is_wanted("METAL_PREFILL_TUNE"):
        choice = _fastest_decode.fastest(builder, options, config)
    if choice is None or choice == _fastest_decode.UNMEASURED:
        return engine
    before = options.metal.fused_norm
    choice.apply(options)
    other = builder.build("metal", options)
    if wrong := _findings(other, config, file_bytes):
        _log.warning("a faster way to decode is not used, because it is wrong: %s", "; ".join(wrong))
        options.metal.fused_norm, options.metal.matvec_rows = before, 0
        return engine
    return other
