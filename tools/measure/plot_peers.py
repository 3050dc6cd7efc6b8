"""Draw the README's chart from the rows of benchmarks.

Each test has a panel. Requires matplotlib, and the files that README.md's commands write::

    python tools/measure/plot_peers.py docs/images/peers.png prompts.json vectors.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

OURS = "metal_prefill"
COLORS = {OURS: "#2a6f97"}
PEERS = "#b0b0b0"
NAMES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}
TITLES = {
    "pp512": "SmolLM-135M's shape, Q4_0:\na prompt of 512 tokens",
    "tg64": "SmolLM-135M's shape, Q4_0:\ndecoding",
    "embed64x64": "all-MiniLM-L6-v2, 8 bits:\nvectors of 64 texts of 64 tokens",
}


def speeds(paths: list[Path]) -> dict[str, dict[str, float]]:
    """Return tokens per second by test and engine."""
    tests: dict[str, dict[str, float]] = {}
    for path in paths:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        for row in rows:
            tests.setdefault(row["test"], {})[row["engine"]] = row["median_ts"]
    return tests


def draw(picture: Path, paths: list[Path]) -> None:
    """Write the chart: a panel for each test, a bar for each engine, the fastest first."""
    import matplotlib.pyplot as plt

    tests = speeds(paths)
    figure, axes = plt.subplots(1, len(tests), figsize=(9, 2.2), constrained_layout=True)
    for axis, (test, engines) in zip(axes, tests.items(), strict=True):
        ranked = dict(sorted(engines.items(), key=lambda item: -item[1]))
        names = [NAMES.get(name, name) for name in ranked]
        bars = axis.barh(names, list(ranked.values()), color=[COLORS.get(name, PEERS) for name in ranked])
        axis.bar_label(bars, labels=[f"{speed:,.0f}" for speed in ranked.values()], padding=3, fontsize=9)
        axis.set_title(TITLES.get(test, test), fontsize=9)
        axis.set_xlim(0, 1.3 * max(ranked.values()))
        axis.invert_yaxis()
        axis.set_xticks([])
        axis.tick_params(axis="y", labelsize=9, length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(picture, dpi=150, metadata={"Software": ""})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("rows", type=Path, nargs="+", help="JSON of `metal-prefill bench --json`")
    arguments = parser.parse_args()
    draw(arguments.picture, arguments.rows)
