"""Make the record of dispatches on an NVIDIA GPU, with which the cost model is compared, from a measurement.

Times and the GPU's name are those of ``tools/measure/bench_gpu.py --json``. Arguments of the dispatches come
from the plan of the same model: this program needs no GPU, but a build with the measured kernels.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support.cost_tables import shape_named
from support.places import DATA

from metal_prefill.gpu._cost_model import plan

RECORDED = (1, 32, 128, 512)  # prompts that are one chunk
NOTE = (
    "Apple family 9 tuning; an event between all dispatches, medians; SmolLM-135M's shape in Q4_0, embedding "
    "in Q8_0; microseconds are sums over the dispatches of a kind, and the arguments are those of the first "
    "of them"
)


def recorded_run(tokens: int, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the kinds of dispatches of a prompt, with their arguments and the sums of their times.

    Raises
    ------
    ValueError
        If other dispatches were measured than those of the plan.
    """
    planned = plan(shape_named("SmolLM-135M"), tokens, family=9)
    if [(d.kernel, list(d.grid)) for d in planned] != [(m["kernel"], m["grid"]) for m in measured]:
        raise ValueError(
            f"{tokens} tokens: {len(measured)} dispatches were measured that differ from the {len(planned)} "
            "of the plan; use the build that was measured"
        )
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for d, m in zip(planned, measured, strict=True):
        in_dim = d.args.get("in_dim", 0)
        row = kinds.setdefault(
            (d.kernel, d.grid, in_dim),
            {
                "kernel": d.kernel,
                "grid": list(d.grid),
                "in_dim": in_dim,
                "count": 0,
                "microseconds": 0.0,
                "threads": d.threads,
                "threadgroup_bytes": d.threadgroup_bytes,
                "args": d.args,
                "runs": [list(run) for run in d.runs],
            },
        )
        row["count"] += 1
        row["microseconds"] += m["microseconds"]
    for row in kinds.values():
        row["microseconds"] = round(row["microseconds"], 1)
    return {"tokens": tokens, "dispatches": list(kinds.values())}


def main(measured_by: str, record: str = str(DATA / "h200_dispatches.json")) -> None:
    """Make the record from the report of ``tools/measure/bench_gpu.py --json``."""
    gpu = json.loads(Path(measured_by).read_text())
    measured = {row["tokens"]: row["dispatches"] for row in gpu["dispatches"] if "streams" not in row}
    found = {
        "device": gpu["speeds"]["device"],
        "note": NOTE,
        "ceilings": gpu["ceilings"],
        "runs": [recorded_run(tokens, measured[tokens]) for tokens in RECORDED],
    }
    text = json.dumps(found, indent=1)
    numbers = re.sub(r"\[([^][{}]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)  # in one line
    Path(record).write_text(numbers + "\n")
