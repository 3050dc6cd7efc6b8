"""Duration, seed and saved inputs of the fuzzers."""

import faulthandler
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from support.places import ROOT, TESTS

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))  # of each target; 0: the suite's number of inputs
RENEWED = 2  # seconds after which a watch restarts: stopping its thread takes longer than many inputs
PATIENCE = 120  # seconds after which an input counts as hanging; sanitizers slow everything down tenfold
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
    finally:  # also if an input failed
        print(f"{i:,} inputs, seed {SEED}")


def sentence(grammar: Mapping[str, Sequence[str]], symbol: str, random: Random, depth: int) -> str:
    """Return a random text of a symbol: one of its rows, in which texts of other symbols replace ``@name``.

    Prefers rows with symbols up to the given depth, and rows without beyond it.
    """
    rows = grammar[symbol]
    row = random.choice([row for row in rows if ("@" in row) == (depth > 0)] or rows)
    return re.sub(r"@(\w+)", lambda name: sentence(grammar, name[1], random, depth - 1), row)


def damaged(text: str, random: Random, pieces: Sequence[str]) -> str:
    """Replace a character by one of these pieces."""
    at = random.randrange(len(text))
    return text[:at] + random.choice(pieces) + text[at + 1 :]


def fuzz(
    target: str, count: int, make: Callable[[Random], bytes], use: Callable[[Path, Random], object]
) -> None:
    """Use the inputs that failed earlier, then `count` generated ones, or as many as the time allows.

    Each is written to a file of this process, which remains if a test fails or the process ends. An input
    that takes too long ends the process, with a traceback.
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
