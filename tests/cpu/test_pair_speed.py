"""The measured speed of bfloat16 products, which is cached for later processes."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.programs import finished

from metal_prefill import _core

OPEN = """
import json
from metal_prefill import Model, _core
Model(device="cpu", threads=1).close()
print(json.dumps([_core.cpu.pair_speedup(), _core.cpu.kernel_sets()]))
"""

pytestmark = pytest.mark.skipif(
    "avx512bf16" not in _core.cpu.kernel_sets(), reason="the processor lacks AVX512-BF16"
)


def outcome(cache: Path) -> tuple[float, list[str]]:
    """Open a model in a separate process; return its measured or cached speed, and its kernel sets."""
    environment = {**os.environ, "METAL_PREFILL_CACHE": str(cache)}
    done = finished([sys.executable, "-c", OPEN], env=environment, check=True)
    speedup, sets = json.loads(done.stdout)
    return speedup, sets


def only_file(cache: Path) -> Path:
    (path,) = (cache / "processors").iterdir()
    return path


def test_a_cached_measurement_is_used(tmp_path: Path) -> None:
    measured, _ = outcome(tmp_path)
    assert float(only_file(tmp_path).read_text()) == measured
    for stored in (0.75, 1.75):
        only_file(tmp_path).write_text(str(stored))
        known, sets = outcome(tmp_path)
        assert known == stored
        assert (sets.index("avx512bf16") < sets.index("avx512vnni")) == (stored >= 1.5)
        assert only_file(tmp_path).read_text() == str(stored)


def test_an_invalid_measurement_is_replaced(tmp_path: Path) -> None:
    outcome(tmp_path)
    for text in ("", "fast", "nan", "inf", "0", "-2", "1e9", "\x00"):
        only_file(tmp_path).write_text(text)
        measured, _ = outcome(tmp_path)
        assert 0.05 <= measured <= 20, text
        assert float(only_file(tmp_path).read_text()) == measured, text


def test_an_unwritable_cache_is_not_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    speedup, _ = outcome(blocked)
    assert speedup > 0
