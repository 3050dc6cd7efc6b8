"""Draw the README's chart: a real model against llama.cpp and OpenVINO.

The figures come from ``docs/measurements/epyc-zen5.md``, section "Long contexts"::

    python tools/measure/plot_peers.py docs/images/peers.png      # needs matplotlib
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

RECORD = Path(__file__).parents[2] / "docs/measurements/epyc-zen5.md"
ROW = re.compile(
    r"^\| (\w+ (?:of|after) [\d,]+ tokens) \| (\d+) tok/s \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE
)
COLORS = {"metal_prefill": "#2a6f97", "OpenVINO": "#a9a9a9", "llama.cpp": "#d0d0d0"}


def speeds() -> dict[str, dict[str, float]]:
    """Return tokens per second by test and engine. A peer's speed is ours divided by the ratio."""
    rows = ROW.findall(RECORD.read_text(encoding="utf-8"))
    if not rows:
        raise SystemExit(f"{RECORD} has no table of long contexts")
    return {
        test: {
            "metal_prefill": float(ours),
            "OpenVINO": float(ours) / float(times_openvino),
            "llama.cpp": float(ours) / float(times_llama_cpp),
        }
        for test, ours, times_llama_cpp, times_openvino in rows
    }


def draw(path: Path) -> None:
    """Write the chart: a panel for each test, a bar for each engine."""
    import matplotlib.pyplot as plt

    tests = speeds()
    figure, axes = plt.subplots(1, len(tests), figsize=(9, 2.6), constrained_layout=True)
    for axis, (test, engines) in zip(axes, tests.items(), strict=True):
        bars = axis.barh(list(engines), list(engines.values()), color=[COLORS[name] for name in engines])
        axis.bar_label(bars, labels=[f"{speed:,.0f}" for speed in engines.values()], padding=3, fontsize=9)
        axis.set_title(test, fontsize=10)
        axis.set_xlim(0, 1.25 * max(engines.values()))
        axis.invert_yaxis()
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        if axis is not axes[0]:
            axis.set_yticks([])
    figure.suptitle(
        "SmolLM2-135M-Instruct (Q4_1), tokens per second, two vCPUs of an AMD EPYC (Zen 5)", fontsize=10
    )
    figure.savefig(path, dpi=150, metadata={"Software": ""})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="PNG to write")
    draw(parser.parse_args().file)
