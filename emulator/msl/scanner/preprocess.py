"""Runs clang's preprocessor over a flat Metal source, with empty stand-ins for Apple's headers."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

from .tokens import SourceError

EMULATOR = Path(__file__).resolve().parents[2]
STUB_HEADERS = EMULATOR / "msl" / "include"
CLANGS = (*(EMULATOR / "clang_names.txt").read_text().split(), "clang++")


def find_clang() -> str:
    """Return the clang to use: ``METAL_EMULATOR_CLANG``, else the first of the known names on the path."""
    if chosen := os.environ.get("METAL_EMULATOR_CLANG"):
        return chosen
    for name in CLANGS:
        if path := shutil.which(name):
            return path
    raise SourceError("clang++ was not found; on Debian: apt-get install clang-19")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the preprocessor to a command line."""
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME[=VALUE]")
    parser.add_argument("-I", dest="include", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--metal-version", type=int, default=300, help="__METAL_VERSION__; default 300")


def flags_of(options: argparse.Namespace) -> list[str]:
    """Return the -D and -I flags of a command line."""
    return [f"-D{d}" for d in options.defines] + [f"-I{i}" for i in options.include]


def preprocess(source: str, metal_version: int, flags: list[str]) -> str:
    """Expand macros and conditions, and keep line markers.

    Parameters
    ----------
    source
        Path of the source.
    metal_version
        Value of ``__METAL_VERSION__``: 300 is Metal 3.0 of macOS 13.
    flags
        More flags, such as -D and -I.
    """
    command = [find_clang(), "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-nostdinc++", "-undef",
               "-Wno-pragma-once-outside-header",
               "-D__METAL__=1", f"-D__METAL_VERSION__={metal_version}", "-D__METAL_MACOS__=1",
               "-D__clang__=1",
               "-I", str(STUB_HEADERS), *flags, source]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SourceError(result.stderr.strip())
    return result.stdout
