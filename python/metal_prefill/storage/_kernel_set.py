"""Kernel set of the CPU engine, and the stored measurement that selects it.

The CPU engine chooses between two sets by the speed of the products of bfloat16 pairs. Sets round
differently, so a process that measured anew on a busy machine could get other bits than the one before.
"""

import os
import platform
import threading
from pathlib import Path

from metal_prefill import _core
from metal_prefill.storage._cache_folder import cache_folder, read_known, write_known

SLOWEST, FASTEST = 0.05, 20.0  # times float32: values outside are not measurements

_lock = threading.Lock()
_settled = False


def kernel_set() -> str:
    """Return the name of the kernel set that the CPU engine uses."""
    settle_pair_speed()
    return os.environ.get("METAL_PREFILL_CPU_ISA") or _core.kernel_sets()[0]


def settle_pair_speed() -> float:
    """Return the speed of products of bfloat16 pairs relative to float32, 0 without such products.

    It is stored if it was measured now. This comes before `_core.kernel_sets` and before the engine.
    """
    global _settled
    with _lock:
        if not _settled and "avx512bf16" in _core.built_sets():
            path, processor = cache_folder() / "processors.json", _processor()
            known = read_known(path)
            if stored := _valid_speed(known.get(processor)):
                _core.use_pair_speedup(stored)
            elif (speedup := _core.pair_speedup()) > 0:
                write_known(path, known | {processor: [repr(speedup)]})
        _settled = True
        return _core.pair_speedup()


def _processor() -> str:
    """Return the identity of the processor: family, model and stepping, or the type of the machine."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    known = "; ".join(value for name, value in processor_facts().items() if name in wanted)
    return known or platform.processor() or platform.machine()


def processor_facts() -> dict[str, str]:
    """Return the fields of the first processor that Linux lists, such as ``model name`` and ``flags``."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _valid_speed(stored: list[str] | None) -> float:
    try:
        (text,) = stored or ("",)
        speedup = float(text)
    except (TypeError, ValueError):
        return 0.0
    return speedup if SLOWEST <= speedup <= FASTEST else 0.0
