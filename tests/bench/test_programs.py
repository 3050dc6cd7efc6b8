"""Peers that are programs with llama-bench's options and JSON, and crashes of llama.cpp."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from metal_prefill import bench, cli
from metal_prefill.bench import _engines, _process

# Writes its arguments to a file, and prints rows as llama-bench does: the first for another test.
PROGRAM = """#!{python}
import json, pathlib, sys

with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
n_prompt, n_gen, depth = int(options["-p"]), int(options["-n"]), int(options.get("-d", 0))
if "-gp" in options:
    depth, n_gen = map(int, options["-gp"].split(","))
other = dict(n_prompt=7, n_gen=7, n_depth=0, samples_ns=[1])
times = [1000 * (n_prompt + n_gen)]
row = dict(n_prompt=n_prompt, n_gen=n_gen, n_depth=depth, samples_ns=times, build_commit="abc123")
print("a line of the log", file=sys.stderr)
print(json.dumps([other, row]))
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def program(tmp_path: Path, log: Path) -> Path:
    return write_program(tmp_path / "llama-bench", PROGRAM.format(python=sys.executable, log=str(log)))


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def measure(demo_path: Path, *compare: str) -> bench.BenchResults:
    return bench.run(
        demo_path,
        prompts=[8],
        n_gen=3,
        depth=5,
        repetitions=2,
        threads=1,
        device="cpu",
        compare=compare,
        patience=0,
    )


@pytest.mark.usefixtures("_quiet_machine")
@pytest.mark.parametrize("name", ["ik_llama.cpp", "llama-bench"])
def test_the_times_are_those_that_the_program_reports(
    name: str, demo_path: Path, program: Path, log: Path
) -> None:
    results = measure(demo_path, f"{name}={program}")
    assert results.row(name, "pp8").samples_ns == [8000, 8000]
    assert results.row(name, "tg3").samples_ns == [3000, 3000]
    row = results.row(name, "pp8")
    assert row.median_ts == 1e6
    assert (row.build, row.n_threads, row.load_ns) == (f"{name} (abc123)", 1, 0)
    assert row.peak_rss > 0
    assert row.ratio is not None
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    for call in calls:
        options = dict(zip(call[::2], call[1::2], strict=True))
        assert options["-m"] == str(demo_path)
        assert (options["-t"], options["-r"], options["-o"], options["-ngl"]) == ("1", "1", "json", "0")
        assert options.get("-rtr") == ("1" if name == "ik_llama.cpp" else None)
    decoding = [call for call in calls if "-gp" in call or "-d" in call]
    assert len(decoding) == 3  # a warm-up run and two samples
    assert decoding[0][-2:] == (["-gp", "5,3"] if name == "ik_llama.cpp" else ["-d", "5"])


def test_the_table_leaves_the_load_time_of_a_program_empty(
    demo_path: Path, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-p", "8", "-n", "0", "-r", "1", "-t", "1", "--device", "cpu", "--patience", "0"]
    assert cli.main(["bench", str(demo_path), *arguments, "--compare", f"ik_llama.cpp={program}"]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.split("│")]
    assert "ik_llama.cpp" in cells
    assert "0.00" not in cells


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("ik_llama.cpp", "give its path, as ik_llama.cpp=/path/to/llama-bench"),
        ("llama.cpp=/bin/true", "llama.cpp is not a program"),
        ("ik_llama.cpp=/no/such/program", "/no/such/program does not exist or is not executable"),
    ],
)
def test_a_path_belongs_to_a_program(word: str, message: str, demo_path: Path) -> None:
    with pytest.raises((ValueError, bench.BenchError), match=message):
        measure(demo_path, word)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'unknown option -rtr' >&2; exit 3", r"failed \(exit code 3\): unknown option -rtr"),
        ("echo '| pp8 | 12 |'", "did not print the JSON of llama-bench"),
        ("echo '[]'", "did not print the JSON of llama-bench"),
        ("kill -KILL $$", r"failed \(SIGKILL\)"),
    ],
)
def test_a_program_that_fails_is_reported(body: str, message: str, demo_path: Path, tmp_path: Path) -> None:
    path = write_program(tmp_path / "broken", f"#!/bin/sh\n{body}\n")
    with pytest.raises(bench.BenchError, match=message):
        measure(demo_path, f"ik_llama.cpp={path}")


@pytest.mark.parametrize("died", [signal.SIGILL, signal.SIGSEGV])
def test_a_crash_of_llama_cpp_on_amx_names_the_compiler(
    died: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(died)})")
    for name, has_amx, named in [
        ("llama.cpp", True, True),
        ("llama.cpp", False, False),
        ("openvino", True, False),
    ]:
        monkeypatch.setattr(_process, "has_amx", lambda value=has_amx: value)
        with pytest.raises(bench.BenchError, match=f"its process died \\({died.name}") as error:
            _process.JsonProcess(name, command, "loading the model")
        assert ("GCC 12 miscompiles llama.cpp: build it with clang" in str(error.value)) == named


def test_programs_are_measured_on_prompts_and_decoding_only() -> None:
    for name in ("ik_llama.cpp", "llama-bench"):
        assert set(_engines.KINDS[name].without) == {"streams", "choices", "embed", "rerank"}
