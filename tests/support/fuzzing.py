"""Shared by the fuzzers: duration, seed, and where inputs are kept."""

import faulthandler
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from support.places import ROOT, TESTS

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))  # of each target; 0: as many inputs as the suite takes
RENEWED = 2  # seconds after which a watch restarts: stopping its thread takes longer than many inputs
PATIENCE = 120  # seconds after which an input counts as one that hangs; sanitizers make all ten times slower
REGRESSIONS = TESTS / "fuzz" / "regressions"
FAILED = ROOT / "build" / "fuzz"


def rounds(
    count: int,  # inputs of the suite
    each: int = 1,  # inputs that are made with one generator
) -> Iterator[Random]:
    """Yield a random number generator for each input: `count` of them, or as many as the time allows."""
    end = time.monotonic() + SECONDS
    i = 0
    try:
        while time.monotonic() < end if SECONDS else i * each < count:
            yield Random(f"{SEED}.{i}")
            i += 1
    finally:  # also where an input failed
        print(f"{i * each:,} inputs, seed {SEED}")


@contextmanager
def watched() -> Iterator[Callable[[], None]]:
    """End the process, with a traceback, where the block does not end.

    The yielded function is called between inputs and restarts the timer.
    """
    begun = -math.inf

    def renew() -> None:
        nonlocal begun
        if (now := time.monotonic()) > begun + RENEWED:
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__ or 2)
            begun = now

    renew()
    try:
        yield renew
    finally:
        faulthandler.cancel_dump_traceback_later()


def place_of(target: str) -> Path:
    """Return where an input of this process is kept."""
    FAILED.mkdir(parents=True, exist_ok=True)
    return FAILED / f"{target}-{os.getpid()}"


@contextmanager
def kept(target: str, content: bytes) -> Iterator[None]:
    """Keep an input where it can be found until it turned out harmless."""
    path = place_of(target)
    path.write_bytes(content)
    with watched():
        yield
    path.unlink()


def fuzz(
    target: str, count: int, make: Callable[[Random], bytes], use: Callable[[bytes, Random], object]
) -> None:
    """Use the inputs that failed once, then `count` made ones, or as many as the time allows."""
    failed = ((path.read_bytes(), Random(1)) for path in sorted(REGRESSIONS.glob(f"{target}-*")))
    made = ((make(random), random) for random in rounds(count))
    for content, random in itertools.chain(failed, made):
        with kept(target, content):
            use(content, random)
