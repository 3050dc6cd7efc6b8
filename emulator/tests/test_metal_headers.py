"""The emulator's headers declare only what Apple's frameworks declare."""

import os
import shutil
from pathlib import Path

import check_metal_api
import pytest
from apple_metadata import Framework

NEEDED = "needs PyPI"


@pytest.fixture(scope="module")
def apple(clang: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Framework]:
    """Apple's API, from wheels on PyPI."""
    try:
        return check_metal_api.read_apple(tmp_path_factory.mktemp("wheels"))
    except RuntimeError as error:
        if os.environ.get("METAL_EMULATOR_REQUIRED"):
            pytest.fail(f"{NEEDED}: {error}")
        pytest.skip(f"{NEEDED}: {error}")


def problems_after(apple: dict[str, Framework], folder: Path, header: str, old: str, new: str) -> str:
    """Return the messages of the check for a changed header."""
    include = folder / "include"
    shutil.copytree(check_metal_api.INCLUDE, include)
    text = (include / header).read_text()
    assert text.count(old) == 1
    (include / header).write_text(text.replace(old, new))
    problems, _ = check_metal_api.check(include, apple)
    return "\n".join(problems)


def test_all_declarations_match_apples(apple: dict[str, Framework]) -> None:
    problems, summary = check_metal_api.check(check_metal_api.INCLUDE, apple)
    assert not problems, "\n".join(problems)
    methods, enums = int(summary.split()[0]), int(summary.split("protocols, ")[1].split()[0])
    assert methods > 60
    assert enums > 30


@pytest.mark.parametrize(
    ("header", "old", "new", "expected"),
    [
        pytest.param(
            "Metal/MTLDevice.h",
            "- (nullable id<MTLCommandQueue>)newCommandQueue;",
            "- (nullable id<MTLCommandQueue>)newCommandQueue;\n- (void)flushEverything;",
            "-[MTLDevice flushEverything]: unknown",
            id="invented method of a protocol",
        ),
        pytest.param(
            "Metal/MTLDevice.h",
            "@property(readonly) NSUInteger maxBufferLength;",
            "@property(readonly) double maxBufferLength;",
            "-[MTLDevice maxBufferLength]: the result is d, Apple's is Q",
            id="wrong result type",
        ),
    ],
)
def test_a_difference_is_found(
    apple: dict[str, Framework], tmp_path: Path, header: str, old: str, new: str, expected: str
) -> None:
    assert expected in problems_after(apple, tmp_path, header, old, new)
