"""``metal-prefill doctor``: a report on the correctness of the GPU's results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from metal_prefill.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    common.add_model_argument(parser)
    parser.add_argument("--quick", action="store_true", help="check in a few seconds, without the benchmark")
    parser.add_argument(
        "--device",
        choices=("auto", "metal"),
        default="auto",
        help="metal: fail if there is no GPU; auto: only report it (default: auto)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("doctor.json"),
        metavar="FILE",
        help="file for the report (default: doctor.json)",
    )


def execute(arguments: argparse.Namespace) -> None:
    """Check the GPU and write the report; exit with 1 if any result differs."""
    from metal_prefill import _core
    from metal_prefill._support.atomic_write import replacing
    from metal_prefill.commands.doctor_report import examine, machine

    with replacing(arguments.json) as part:  # report an unwritable file before the work
        if arguments.device == "auto" and not _core.metal_available():
            report = {"machine": machine(), "passed": True}
            print(f"no GPU to check: {_core.metal_device()['problem']}")
        else:
            report = examine(common.model_path(arguments.model), quick=arguments.quick, say=print)
        with open(part, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(f"report: {arguments.json}")
    if not report["passed"]:
        raise SystemExit(1)
