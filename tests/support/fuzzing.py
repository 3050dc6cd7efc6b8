"""Shared by the fuzzers: duration, seed, and where inputs are kept."""

import faulthandler
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from support.places import ROOT, TESTS

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))  # of each target; 0: as many inputs as the suite takes
RENEWED = 2  # seconds after which a watch restarts: stopping its thread takes longer than many inputs
PATIENCE = 120  # seconds after which an input counts as one that hangs; sanitizers make all ten times slower
REGRESSIONS = TESTS / "fuzz" / "regressions"
FAILED = ROOT / "build" / "fuzz"


def _rounds(count: int) -> Iterator[Random]:
    """Yield a random number generator for each input: `count` of them, or as many as the time allows."""
    end = time.monotonic() + SECONDS
    i = 0
    try:
        while time.monotonic() < end if SECONDS else i < count:
            yield Random(f"{SEED}.{i}")
            i += 1
    finally:  # also where an input failed
        print(f"{i:,} inputs, seed {SEED}")


def fuzz(
    target: str, count: int, make: Callable[[Random], bytes], use: Callable[[Path, Random], object]
) -> None:
    """Use the inputs that failed once, then `count` made ones, or as many as the time allows.

    Each is in a file of this process, which remains if a test fails or the process ends. An input that takes
    too long ends the process, with a traceback.
    """
    FAILED.mkdir(parents=True, exist_ok=True)
    path = FAILED / f"{target}-{os.getpid()}"
    failed = ((path.read_bytes(), Random(1)) for path in sorted(REGRESSIONS.glob(f"{target}-*")))
    made = ((make(random), random) for random in _rounds(count))
    begun = -math.inf
    try:
        for content, random in itertools.chain(failed, made):
            if (now := time.monotonic()) > begun + RENEWED:
                faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__ or 2)
                begun = now
            path.write_bytes(content)
            use(path, random)
    finally:
        faulthandler.cancel_dump_traceback_later()
    path.unlink()
