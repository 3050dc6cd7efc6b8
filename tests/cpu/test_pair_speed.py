"""The measured speed of bfloat16 products, which is cached for later processes."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.programs import finished

from metal_prefill import _core

# Opens a model in a process for each stored value; the first time, none is stored. Prints the speed, the
# kernel sets and what is stored then.
OPEN = """
import json, os, sys
from pathlib import Path
from metal_prefill import Model, _core
path = Path(os.environ["METAL_PREFILL_CACHE"], "processors.json")
for text in [None, *json.loads(sys.argv[1])]:
    if text is not None:
        (processor,) = json.loads(path.read_text())
        path.write_text(json.dumps({processor: text}))
    if os.fork():
        if os.wait()[1]:
            sys.exit(f"with {text!r}")
        continue
    Model(device="cpu", threads=1).close()
    kept = [stored[0] for stored in json.loads(path.read_text()).values()] if path.exists() else []
    print(json.dumps([_core.pair_speedup(), _core.kernel_sets(), *kept]), flush=True)
    break
"""

pytestmark = pytest.mark.skipif(
    "avx512bf16" not in _core.kernel_sets(), reason="the processor lacks AVX512-BF16"
)


def outcomes(cache: Path, *stored: Any) -> list[Any]:
    """Return what `OPEN` prints: without a stored value, and with each."""
    environment = {**os.environ, "METAL_PREFILL_CACHE": str(cache)}
    done = finished([sys.executable, "-c", OPEN, json.dumps(stored)], env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_cached_measurement_is_used(tmp_path: Path) -> None:
    (measured, _, kept), *others = outcomes(tmp_path, ["0.75"], ["1.75"])
    assert float(kept) == measured
    for (known, sets, kept), stored in zip(others, (0.75, 1.75), strict=True):
        assert known == stored
        assert (sets.index("avx512bf16") < sets.index("avx512vnni")) == (stored >= 1.5)
        assert kept == str(stored)


def test_an_invalid_measurement_is_replaced(tmp_path: Path) -> None:
    texts = (*([text] for text in ("", "fast", "nan", "0", "1e9")), [], ["1", "2"], [[]], 1.5)
    for text, (measured, _, kept) in zip((None, *texts), outcomes(tmp_path, *texts), strict=True):
        assert 0.05 <= measured <= 20, text
        assert float(kept) == measured, text


def test_an_unwritable_cache_is_not_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    ((speedup, _),) = outcomes(blocked)  # nothing is stored
    assert speedup > 0
