"""The commands that replace Apple's compiler when the extension is built for macOS without a Mac."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import cross_macos
import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are shell scripts")
@pytest.mark.parametrize(
    ("given", "passed"),
    [
        pytest.param("-E a.cpp -o -", "-E a.cpp", id="prints"),  # else zig writes a file of that name
        pytest.param("-x c++ -E - -DA", "-x c++ -E - -DA", id="reads"),
        pytest.param("-c a.cpp -o a.o", "-c a.cpp -o a.o", id="compiles"),
        pytest.param(
            "-bundle a.o -Wl,-x -o a.so", "-shared a.o -o a.so -Wl,-undefined,dynamic_lookup", id="links"
        ),
    ],
)
def test_compiler_arguments_are_translated_for_zig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, passed: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    cross_macos.write_tools(tmp_path / "tools")
    done = subprocess.run(
        [tmp_path / "tools" / "c++", *given.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == f"-m ziglang c++ -target aarch64-macos.13.0 {passed}".split()


PAGE_SHIFT = 12


def signed(code: bytes) -> bytes:
    """Return code with an ad-hoc signature, laid out as in Apple's cs_blobs.h."""
    pages = [code[at : at + (1 << PAGE_SHIFT)] for at in range(0, len(code), 1 << PAGE_SHIFT)]
    hashes = b"".join(hashlib.sha256(page).digest() for page in pages)
    name = b"library\0"
    first_hash = 44 + len(name)
    directory = struct.pack(
        ">9I4BI",
        *(0xFADE0C02, first_hash + len(hashes), 0x20100, 0x20002, first_hash, 44, 0, len(pages), len(code)),
        *(32, 2, 0, PAGE_SHIFT, 0),
    )
    blob = directory + name + hashes
    return code + struct.pack(">5I", 0xFADE0CC0, 20 + len(blob), 1, 0, 20) + blob


def test_a_code_signature_must_match_the_code() -> None:
    code = bytes(range(256)) * 50  # the last page is not full
    data = bytearray(signed(code))
    assert cross_macos.check_signature(bytes(data), len(code)) == 4
    with pytest.raises(cross_macos.CheckError, match="no ad-hoc code signature"):
        cross_macos.check_signature(bytes(data), 0)
    data[2 << PAGE_SHIFT] ^= 1
    with pytest.raises(cross_macos.CheckError, match="page 2 differs from its hash"):
        cross_macos.check_signature(bytes(data), len(code))


def test_a_code_signature_must_cover_the_code() -> None:
    data = signed(bytes(5000))
    longer = data[:5000] + bytes(100) + data[5000:]
    with pytest.raises(cross_macos.CheckError, match="2 hashes of type 2 for 5000 of 5100 bytes"):
        cross_macos.check_signature(longer, 5100)
