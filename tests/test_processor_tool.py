"""Messages of `tools/test_processor.py` about a step that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import test_processor as tool  # noqa: E402


@pytest.mark.parametrize(
    ("program", "limit_s", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", 60, "died (SIGILL)"),
        ("raise SystemExit(3)", 60, "failed (exit code 3)"),
        ("print('no limit: its process died (SIGILL)')", 60, "lost a process"),
        ("import time; time.sleep(60)", 0.5, "did not end"),
    ],
)
def test_a_failed_step_is_reported(
    program: str,
    limit_s: float,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool, "TIME_LIMIT_S", limit_s)
    assert not tool.run(tool.Step("step", ("-c", program)))
    assert f"step: {said} in" in capsys.readouterr().out


def test_a_successful_step_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.run(tool.Step("step", ("-c", "print('figures')")))
    said, figures = capsys.readouterr().out.splitlines()
    assert said.startswith("step: passed in")
    assert figures.strip() == "figures"


def test_each_instruction_set_of_this_processor_is_measured() -> None:
    steps = tool.steps(["amx", "avx2", "scalar"], Path("tests"), 2)
    measured = [step.command[-1] for step in steps if "--isa" in step.command]
    assert measured == ["amx", "avx2", "scalar"]
    assert "not metal and not neon" in steps[0].command
    assert "not metal" in tool.steps(["neon", "scalar"], Path("tests"), 2)[0].command
