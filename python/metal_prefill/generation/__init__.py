"""Text generation: streams, continuous batching, sampling, speculation, constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill._support.lazy import lazy_names

if TYPE_CHECKING:
    from metal_prefill.generation._sampling import Options, Sampler
    from metal_prefill.generation._scheduler import Scheduler
    from metal_prefill.generation._stream import Stream

__all__ = ["Options", "Sampler", "Scheduler", "Stream"]

__getattr__ = lazy_names(__name__, _sampling="Options Sampler", _scheduler="Scheduler", _stream="Stream")
