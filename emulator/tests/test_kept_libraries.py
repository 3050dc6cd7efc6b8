"""Compiled libraries that are kept belong to the sources and options that they were compiled from."""

from __future__ import annotations

from pathlib import Path

import pytest
import shader_library
from shader_library import compiler_digest, kept_in


def test_a_change_of_what_is_compiled_makes_another_library(tmp_path: Path, clang: str) -> None:
    source, header = tmp_path / "a.metal", tmp_path / "a.h"
    source.write_text("kernel")
    found = [kept_in(tmp_path, clang, [source], "", 310)]
    assert kept_in(tmp_path, clang, [source], "", 310) == found[0]
    found.append(kept_in(tmp_path, clang, [source], "", 400))
    header.write_text("header")
    found.append(kept_in(tmp_path, clang, [source], "", 310))
    source.write_text("other kernel")
    found.append(kept_in(tmp_path, clang, [source], "", 310))
    assert len({library for library, _ in found}) == 4
    assert len({executor for _, executor in found}) == 1
    sanitized = kept_in(tmp_path, clang, [source], "thread", 310)
    assert not {*sanitized} & {folder for pair in found for folder in pair}


@pytest.mark.parametrize("name", ["cpu/executor.cpp", "msl/scanner/emit.py", "msl/shim/math.h"])
def test_a_change_of_the_emulator_makes_other_libraries(
    name: str, tmp_path: Path, clang: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shader_library, "EMULATOR", tmp_path)
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text("1")
    before = compiler_digest.__wrapped__(clang)
    file.write_text("2")
    assert compiler_digest.__wrapped__(clang) != before
