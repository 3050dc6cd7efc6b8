"""The command `bench`."""

import json
import sys
from pathlib import Path

import pytest
from support.programs import finished

from metal_prefill import cli
from metal_prefill.synth import synthesize


def test_the_command_prints_only_json() -> None:
    words = "metal_prefill.bench --demo -p 4 -n 2 -r 1 -t 1 --patience 0"
    command = [sys.executable, "-m", *words.split()]
    out = finished([*command, "--json", "-"], check=True).stdout
    assert [row["test"] for row in json.loads(out)] == ["pp4", "tg2"]


@pytest.mark.usefixtures("_quiet_machine")
def test_the_command_measures_the_named_model(tmp_path: Path) -> None:
    model = synthesize(tmp_path / "named.gguf", preset="tiny")
    rows = tmp_path / "rows.json"
    options = ["-p", "4", "-n", "0", "-r", "1", "-t", "1", "--json", str(rows)]
    assert cli.main(["bench", "-m", str(model), *options]) == 0
    assert json.loads(rows.read_text())[0]["model_filename"] == str(model)


@pytest.mark.usefixtures("_quiet_machine")
def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert cli.main(["bench", "--demo", "-p", "4", "-n", "2", "-r", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    for row in json.loads(file.read_text(encoding="utf-8")):
        assert row["test"] in out
