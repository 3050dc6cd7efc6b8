"""The command `bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from metal_prefill import cli


def test_the_command_prints_json_alone() -> None:
    command = [
        sys.executable,
        "-m",
        "metal_prefill.bench",
        "--demo",
        "-p",
        "4",
        "-n",
        "2",
        "-r",
        "1",
        "-t",
        "1",
    ]
    out = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, check=True).stdout
    assert [row["test"] for row in json.loads(out)] == ["pp4", "tg2"]


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert cli.main(["bench", "--demo", "-p", "4", "-n", "2", "-r", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for row in json.loads(file.read_text(encoding="utf-8")):
        assert row["test"] in out
