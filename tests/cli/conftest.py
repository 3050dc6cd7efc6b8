"""Commands that run in the process of their test."""

import pytest
from support.programs import Run

from metal_prefill import cli


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command that must succeed; return what it prints to standard output."""

    def run(*arguments: object) -> str:
        assert cli.main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return what it prints to standard error."""

    def run(*arguments: object, code: int = 2) -> str:
        assert cli.main(list(map(str, arguments))) == code
        return capsys.readouterr().err

    return run
