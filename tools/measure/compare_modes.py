"""Compare the compute modes of encoders on real texts; prints the table of ``docs/accuracy.md``.

Texts are the longest paragraphs of this documentation and of other files::

    python tools/measure/compare_modes.py minilm path/to/all-mpnet-base-v2 --texts play.txt

Compares each mode's vectors with ``compute="f32"``: 1 - cosine, the share of the ten nearest neighbours of a
text that are the same, and how often the rest of a paragraph is among the ten texts nearest to its first
sentence.
"""

import argparse
import re
import time
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from metal_prefill import Model
from metal_prefill.hub import resolve_model

Vectors: TypeAlias = npt.NDArray[np.float32]

NEAREST = 10
MODES = ("f32", "int16", "bf16", "w8a8")


def paragraphs(paths: list[Path], n: int) -> list[tuple[str, str]]:
    """Return the first sentences of the longest paragraphs of files, and the rest of each."""
    found = []
    for path in paths:
        for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            head, _, rest = " ".join(block.split()).partition(". ")
            if len(head) > 30 and 60 < len(rest) < 600:  # no model truncates these
                found.append((head, rest))
    return sorted(found, key=lambda pair: -len(pair[1]))[:n]


def neighbours(vectors: Vectors) -> list[set[int]]:
    """Return the nearest neighbours of each vector among the others."""
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    return [set(row) for row in np.argsort(-scores, axis=1)[:, :NEAREST].tolist()]


def main() -> None:
    """Print a row for each model and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or files of encoders")
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="more files with paragraphs")
    parser.add_argument("-n", type=int, default=500, help="texts")
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()
    pairs = paragraphs([*sorted(Path(__file__).parents[2].glob("docs/**/*.md")), *args.texts], args.n)
    heads, rests = map(list, zip(*pairs, strict=True))
    print(f"{len(pairs)} texts")
    print("| model | compute | 1 - cosine: mean, worst | nearest ten kept | found | texts/s | MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in args.models:
        path = resolve_model(name)
        exact: Vectors | None = None
        for mode in MODES:
            with Model(path, compute=mode, threads=args.threads, device="cpu") as model:
                model.embed(rests[:8])
                begin = time.perf_counter()
                vectors = np.asarray(model.embed(rests))
                seconds = time.perf_counter() - begin
                scores = np.asarray(model.embed(heads)) @ vectors.T
                stats = model.stats()
            exact = vectors if exact is None else exact
            distances = 1 - np.sum(vectors.astype(np.float64) * exact, axis=1)
            better = np.sum(scores > np.diagonal(scores)[:, None], axis=1)
            kept = [len(a & b) for a, b in zip(neighbours(vectors), neighbours(exact), strict=True)]
            print(
                f"| {Path(name).name} | `{mode}` | {distances.mean():.1e}, {distances.max():.1e} "
                f"| {np.mean(kept) / NEAREST:.1%} | {np.mean(better < NEAREST):.1%} "
                f"| {len(rests) / seconds:.0f} | {stats.get('weight_bytes', 0) / 2**20:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
