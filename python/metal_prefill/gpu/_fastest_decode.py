"""Choice between ways to decode a token that give the same bits, by their times on the GPU.

The times are measured when the first model of a shape is opened on a GPU, and the choice is stored in the
cache folder by device, OS build, package version and shape.
"""

from __future__ import annotations

import logging
import os
import statistics
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from metal_prefill import _core
from metal_prefill.errors import DeviceError
from metal_prefill.storage._cache_folder import cache_folder, cache_key, read_known, write_known

if TYPE_CHECKING:
    from metal_prefill._core import ModelConfig

_log = logging.getLogger("metal_prefill")

_TOKENS = 12  # decoded for a time, after three others
_GAIN = 0.98  # a choice must take less than this share of the time of a simpler one


@dataclass(frozen=True)
class Choice:
    """Options of the Metal engine: see :func:`metal_prefill.gpu._cost_model.plan`."""

    fused_norm: bool
    matvec_rows: int

    def apply(self, options: _core.EngineOptions) -> None:
        options.metal.fused_norm = self.fused_norm
        options.metal.matvec_rows = self.matvec_rows

    @property
    def stored(self) -> list[str]:
        return [str(int(self.fused_norm)), str(self.matvec_rows)]


UNMEASURED = Choice(fused_norm=False, matvec_rows=1)  # default of an engine without a measurement
_CHOICES = [Choice(fused, rows) for fused in (False, True) for rows in (1, 2, 4)]


def is_wanted(variable: str) -> bool:
    """Return whether to test or measure: on real GPUs, unless an environment variable is set to 0 or 1."""
    setting = os.environ.get(variable, "")
    return setting == "1" or (setting != "0" and not _core.has_emulator)


def decode_seconds(engine: _core.Engine, vocab_size: int) -> float:
    """Return the GPU's median time for a token after a few others."""
    session = engine.session(0)
    tokens = np.arange(3, dtype=np.int32) % vocab_size
    times = []
    for _ in range(4 + min(_TOKENS, session.max_context - 6)):
        tokens = np.array(_core.Request.greedy(session, tokens).run(), np.int32)
        times.append(session.stats()["gpu_seconds"])
    return statistics.median(times[4:])


def fastest(builder: _core.ModelBuilder, options: _core.EngineOptions, config: ModelConfig) -> Choice | None:
    """Return the fastest choice; None if there is nothing to decide.

    Fused norms are compared first, then numbers of rows.
    """
    given = options.metal.fused_norm
    if not config.generates or config.context_length < 8 or options.metal.matvec_rows:
        return None
    device = _core.metal_device().get("name", "")
    shape = [config.architecture, config.n_layers, config.dim, config.ffn_dim, config.vocab_size]
    key = cache_key([device, shape, given])
    path = cache_folder() / "decode.json"
    known = read_known(path)
    for choice in _CHOICES:
        if known.get(key) == choice.stored:
            return choice

    _log.warning(
        "measuring ways to decode, once for this GPU and models of this shape (METAL_PREFILL_TUNE=0: not)"
    )

    def seconds(choice: Choice) -> float:
        choice.apply(options)
        options.metal.is_measured = True
        try:
            return decode_seconds(builder.build("metal", options), config.vocab_size)
        except DeviceError as error:
            _log.warning("%s is not used: %s", choice, error)
            return inf
        finally:
            options.metal.fused_norm, options.metal.matvec_rows = given, 0
            options.metal.is_measured = False

    best = UNMEASURED if given is None else Choice(given, 1)
    time = seconds(best)
    if given is None and (other := seconds(Choice(not best.fused_norm, 1))) < _GAIN * time:
        best, time = Choice(not best.fused_norm, 1), other
    limit = _GAIN * time
    for choice in (Choice(best.fused_norm, 2), Choice(best.fused_norm, 4)):
        if (other := seconds(choice)) < limit:
            best, limit = choice, other
    known[key] = best.stored
    write_known(path, known)
    return best
