"""``metal-prefill doctor``: a report on the correctness of the GPU's results.

Each stage runs in a separate process, since drivers may abort or hang. The report always names the stage, how
its process ended, and its last output.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

from metal_prefill._support.atomic_write import replacing
from metal_prefill.commands import common

Report = dict[str, Any]

# Time limits of stages in seconds. Waits for the GPU end after 60, with an error that names the work.
LIMITS = {"machine": 60, "shaders": 600, "kernels": 600, "results": 600, "speed": 600}
QUICK = ("machine", "kernels", "results")
LAST_LINES = 40

EXAMPLE = "metal-prefill doctor --quick"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_argument(parser)
    parser.add_argument("--quick", action="store_true", help="check in a few seconds, without the benchmark")
    what = "metal: fail if there is no GPU; auto: only report it"
    common.add_option(parser, "--device", what, "auto", choices=("auto", "metal"))
    common.add_option(parser, "--json", "file for the report", Path("doctor.json"), type=Path, metavar="FILE")


def execute(arguments: argparse.Namespace) -> None:
    """Run all stages and write the report after each; exit with 1 unless all results agree."""
    report: Report = {"quick": arguments.quick, "passed": False, "stages": {}}
    _write(arguments.json, report)  # reports an unwritable file before the work
    path = common.model_path(arguments.model)
    passed = True
    for name in QUICK if arguments.quick else LIMITS:
        print(f"-- {name} (at most {LIMITS[name]} s)", flush=True)
        stage = _run(name, [str(path) if path else "", "quick" if arguments.quick else "", arguments.device])
        report |= stage.pop("report", {})
        if "problem" in stage:
            print(f"FAILED: {name}: {stage['problem']}")
            report.setdefault("problem", stage["problem"])  # the first problem is the most relevant
        passed = passed and stage["passed"]
        report["stages"][name] = stage
        _write(arguments.json, report)
        if name == "machine" and (not passed or "problem" in report["machine"]["gpu"]):
            break
    report["passed"] = passed
    _write(arguments.json, report)
    print(f"report: {arguments.json}")
    print(conclusion(report, arguments.json))
    if not passed:
        raise SystemExit(1)


def _write(path: Path, report: Report) -> None:
    with replacing(path) as part, open(part, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)


def _run(name: str, arguments: Sequence[str]) -> Report:
    """Run a stage; return whether it passed, how it ended, its time, and its part of the report."""
    begin = time.monotonic()
    last: deque[str] = deque(maxlen=LAST_LINES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stage.json"
        code = f"from {__package__}.doctor_report import main; main()"
        command = [sys.executable, "-X", "faulthandler", "-c", code]
        process = subprocess.Popen(
            [*command, name, str(file), *arguments],
            env=os.environ | {"METAL_PREFILL_CHECK": "0", "PYTHONUNBUFFERED": "1"},  # it is checked here
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None, "it is a pipe"
        reader = Thread(target=_print, args=(process.stdout, last), daemon=True)
        reader.start()
        ended = "done"
        try:
            status = process.wait(LIMITS[name])
            if status < 0:
                ended = f"ended by {signal.Signals(-status).name}"
            elif status > 0:
                ended = f"exit code {status}"
        except subprocess.TimeoutExpired:
            ended = f"no answer within {LIMITS[name]} s"
            process.send_signal(signal.SIGABRT)  # Python then prints the traceback
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            process.kill()
        reader.join(5)
        found: Report = {"passed": False}
        if ended == "done":
            found = json.loads(file.read_text(encoding="utf-8"))
    found |= {"ended": ended, "seconds": round(time.monotonic() - begin, 3)}
    if ended != "done":
        found |= {"problem": ended, "last_lines": list(last)}
    return found


def _print(lines: IO[str], last: deque[str]) -> None:
    with lines:
        for line in lines:
            last.append(line.rstrip("\n"))
            print(line, end="", flush=True)


def conclusion(report: Report, file: Path) -> str:
    """Return one line: the working parts, the speed compared with the prediction, and the file to send."""
    gpu = report.get("machine", {}).get("gpu", {})
    if "problem" in gpu:
        return f"no GPU to check: {gpu['problem']}"
    stages = report["stages"]
    failed = ", ".join(name for name in stages if not stages[name]["passed"])
    agree = ", ".join(name for name in stages if stages[name]["passed"])
    parts = [f"FAILED: {failed}; passed: {agree or 'nothing'}"] if failed else ["all results agree"]
    for b in report.get("benchmark", ()):
        low, high = b.get("predicted_range", (0, 0))
        predicted = f" (predicted {low:.0f} to {high:.0f})" if high else ""
        parts.append(f"{b['name']} {b['tokens_per_second']:.0f} tokens/s{predicted}")
    return f"{'; '.join(parts)}; please attach {file} to an issue"
