"""Errors of benchmarks."""

from __future__ import annotations

from metal_prefill.errors import MetalPrefillError


class BenchError(MetalPrefillError):
    """A benchmark cannot begin or continue; names the engine."""
