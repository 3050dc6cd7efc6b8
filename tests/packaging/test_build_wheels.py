"""The tool that builds wheels: its compiler calls and its checks."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import build_wheels
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the commands are shell scripts")


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        pytest.param("-mavx512f -mavx2 -c a.cpp", "-mavx512f -mevex512 -mavx2 -c a.cpp", id="512 bits"),
        pytest.param("-march=armv8.2-a+dotprod a", "-mcpu=generic+v8_2a+dotprod a", id="architecture"),
        pytest.param("-E a.cpp -o -", "-E a.cpp", id="prints"),
        pytest.param("-E - -o a.i", "-E - -o a.i", id="reads"),
    ],
)
def test_compiler_arguments_are_translated_for_zig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, passed: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    arguments = ["build_wheels", "--write-tools", str(tmp_path / "tools"), "--platforms", "aarch64"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "executable", str(python))
    assert build_wheels.main() == 0
    done = subprocess.run(
        [tmp_path / "tools" / "c++", *given.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == f"-m ziglang c++ -target aarch64-linux-gnu.2.28 {passed}".split()


def test_a_free_threaded_python_is_told_from_the_regular_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, version in (("3.14.7", "3.14"), ("3.14.7t", "3.14t"), ("3.13.1t", "3.13")):
        python = tmp_path / "versions" / folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert build_wheels.find_python("3.14").parts[-3] == "3.14.7"
    assert build_wheels.find_python("3.14t").parts[-3] == "3.14.7t"
    with pytest.raises(build_wheels.WheelError, match=r"there is no Python 3\.13t"):
        build_wheels.find_python("3.13t")


def test_a_wheel_for_another_system_is_not_built_without_a_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module cannot be imported here: its stub is that of a build for this machine."""
    built: list[str] = []
    monkeypatch.setattr(build_wheels, "build_macos", lambda version, *_: built.append(version))
    monkeypatch.setattr(sys, "argv", ["build_wheels", "--platforms", "macos", "--folder", str(tmp_path)])
    with pytest.raises(build_wheels.WheelError, match=r"there is no .*_core\.pyi, .*: add .* to --platforms"):
        build_wheels.main()
    assert built == []


CONTENTS = ("_core.abi3.so", "_core.pyi", "py.typed", "data/demo.gguf")


@pytest.mark.parametrize(
    ("names", "megabytes", "message"),
    [
        (CONTENTS, 13, "13.0 MB, more than 12"),
        (CONTENTS[1:], 0, "expected one extension"),
        ((*CONTENTS, "_cpu_testing.abi3.so"), 0, "expected one extension"),
        (CONTENTS[:1] + CONTENTS[2:], 0, r"lacks metal_prefill/_core\.pyi"),
        (CONTENTS[:3], 0, "lacks the bundled model"),
        (CONTENTS, 0, None),
    ],
    ids=["size", "no extension", "extension for tests", "no stub", "no model", "valid"],
)
def test_an_incomplete_or_oversized_wheel_is_rejected(
    tmp_path: Path, names: tuple[str, ...], megabytes: int, message: str | None
) -> None:
    wheel = tmp_path / "metal_prefill-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(f"metal_prefill/{name}", b"")
        archive.writestr("metal_prefill/padding", bytes(megabytes * 10**6))
    if message is None:
        assert build_wheels.check_contents(wheel) == wheel.stat().st_size
    else:
        with pytest.raises(build_wheels.WheelError, match=message):
            build_wheels.check_contents(wheel)
