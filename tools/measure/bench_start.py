#!/usr/bin/env python3
"""Measure how long a program waits: for `import metal_prefill`, and from `Model()` to the first token.

    python tools/measure/bench_start.py            # medians of new processes: wall and processor time
    python tools/measure/bench_start.py --modules  # the slowest imports of `from metal_prefill import Model`

A busy machine disturbs wall time more than processor time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys

CASES = {
    "import metal_prefill": ("", "import metal_prefill"),
    "from metal_prefill import Model": ("", "from metal_prefill import Model"),
    "Model() to the first token": (
        "from metal_prefill import Model",
        "next(Model(device='cpu').generate('ROMEO:', 1))",
    ),
}
TIMER = """
import json, time
{before}
wall, used = time.perf_counter(), time.process_time()
{timed}
print(json.dumps([time.perf_counter() - wall, time.process_time() - used]))
"""


def measure(before: str, timed: str, repetitions: int) -> tuple[float, float]:
    """Return the medians of wall and processor time in seconds."""
    program = TIMER.format(before=before, timed=timed)
    command = [sys.executable, "-c", program]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL
    )  # fills caches of the system and of bytecode
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(repetitions)
    ]
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


def slowest_modules(count: int) -> list[tuple[float, str]]:
    """Return the modules whose import takes longest without what they import, in milliseconds."""
    command = [sys.executable, "-X", "importtime", "-c", "from metal_prefill import Model"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    rows = re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", report, flags=re.MULTILINE)
    return sorted(((int(own) / 1e3, name) for own, name in rows), reverse=True)[:count]


def main() -> int:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-r", "--repetitions", type=int, default=15)
    parser.add_argument("--modules", action="store_true", help="list the slowest imports")
    options = parser.parse_args()
    if options.modules:
        for milliseconds, name in slowest_modules(15):
            print(f"{milliseconds:7.1f} ms  {name}")
        return 0
    for name, (before, timed) in CASES.items():
        wall, used = measure(before, timed, options.repetitions)
        print(f"{name:32} {1e3 * wall:6.0f} ms, {1e3 * used:6.0f} ms of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
