"""Measure the savings of sessions: reuse, forks, saved state, shared prefixes, and the memory of each.

Prints the table of ``docs/measurements/sessions.md``: medians of samples taken in turns::

    python tools/measure/measure_sessions.py               # SmolLM-135M's shape, written on first use
    python tools/measure/measure_sessions.py model.gguf -n 1000 -r 5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from metal_prefill import Model
from metal_prefill.bench._model_file import smollm_shape

NEW = 16  # tokens after the shared prefix
ANSWERS = 8  # prompts with a shared prefix


def in_turns(repetitions: int, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Time the calls in alternation, repeatedly; return milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if repetition:  # the first warms up
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def measure(model: Model, n: int, repetitions: int, folder: Path) -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, model.config.vocab_size, n).tolist()
    branches = [rng.integers(0, model.config.vocab_size, NEW).tolist() for _ in range(ANSWERS)]
    prompts = [shared + branch for branch in branches]
    held, work, path = model.session(), model.session(), folder / "state"
    held.forward_prompt(shared)
    held.save(path)

    def compute() -> None:
        work.reset()
        work.forward_prompt(shared)

    def compute_longer() -> None:
        work.reset()
        work.forward_prompt(prompts[0])

    def reuse() -> None:
        held.forward_prompt(prompts[0], reuse=True)
        held.rewind(n)

    def fork() -> None:
        held.fork().close()

    def load() -> None:
        model.load_session(path).close()

    def save() -> None:
        held.save(path)

    def score_each() -> None:
        for prompt in prompts:
            model.score(prompt)

    times = in_turns(
        repetitions,
        {
            f"computing {n} tokens": compute,
            "loading them from a file": load,
            "saving them": save,
            "forking a session that holds them": fork,
            f"computing {n + NEW} tokens": compute_longer,
            f"the same with reuse of the first {n}": reuse,
            f"scoring {ANSWERS} prompts that share {n} tokens, one by one": score_each,
            "scoring them together": lambda: model.score_many(prompts),
        },
    )
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    alone, longer, apart = (name for name in times if name.startswith(("computing", "scoring 8")))
    against = {"loading": alone, "saving": alone, "forking": alone, "the same": longer, "scoring them": apart}
    print("| | ms, median (min to max) | faster than computing |\n| --- | --- | --- |")
    for name, taken in times.items():
        base = next((base for beginning, base in against.items() if name.startswith(beginning)), None)
        ratio = f"{medians[base] / medians[name]:.0f}x" if base else ""
        print(f"| {name} | {medians[name]:.2f} ({min(taken):.2f} to {max(taken):.2f}) | {ratio} |")
    print(f"\nThe file of {n} tokens has {path.stat().st_size:,} bytes.")
    for count in (0, 1, 100, n):
        with model.session() as session:
            if count:
                session.forward_prompt(shared[:count])
            print(f"a session with {count} tokens: {int(session.stats()['kv_cache_bytes']):,} bytes of cache")


def main() -> None:
    """Measure on the given model, or on the shape in the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL.gguf")
    parser.add_argument("-n", type=int, default=1000, metavar="N", help="shared tokens (default: 1000)")
    parser.add_argument("-r", type=int, default=5, metavar="N", help="number of samples (default: 5)")
    arguments = parser.parse_args()
    path = arguments.model or smollm_shape()
    with tempfile.TemporaryDirectory() as folder, Model(path, device="cpu") as model:
        print(f"{path.name}, {model.device}\n")
        measure(model, arguments.n, arguments.r, Path(folder))


if __name__ == "__main__":
    main()
