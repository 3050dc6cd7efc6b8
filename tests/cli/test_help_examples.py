"""The example with which the help of a command begins works as it is printed."""

import argparse
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from metal_prefill import cli
from metal_prefill.commands import bench, demo

CALLS = [name for name in cli.COMMANDS if name not in ("serve", "doctor", "trace")]  # the last need a GPU
MODELS = {"smollm2": "smollm2_path", "minilm": "minilm_folder"}  # fixtures that skip where one is missing


def example(name: str) -> str:
    found: str = importlib.import_module(f"metal_prefill.commands.{name}").EXAMPLE
    assert f"metal-prefill {name}" in found
    return found


@contextmanager
def started(line: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a line in a shell that finds this installation of the command first."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "METAL_PREFILL_DEVICE": "cpu"}
    with subprocess.Popen(
        ["sh", "-c", f"exec {line}" if "|" not in line else line],
        cwd=folder, env=env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        yield process


def test_help_begins_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0, name
        assert capsys.readouterr().out.startswith(f"example: {example(name)}\n\nusage: ")


@pytest.mark.parametrize("name", CALLS)
def test_the_example_of_a_command_works(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for model, fixture in MODELS.items():
        if model in example(name):
            request.getfixturevalue(fixture)
    with started(example(name), tmp_path) as process:
        if name == "demo":  # test_demo.py runs it to its end, with a shorter benchmark
            assert process.stdout is not None
            assert any(line.startswith("$ metal-prefill bench ") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == cli.EXIT_INTERRUPTED
            parser = argparse.ArgumentParser()
            bench.add_arguments(parser)
            assert parser.parse_args(["tokens", *demo.BENCH]).prompts
            return
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert output


def test_the_example_of_the_server_serves(tmp_path: Path) -> None:
    with started(example("serve").replace("8080", "0"), tmp_path) as process:
        assert process.stdout is not None
        assert any("http://" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
