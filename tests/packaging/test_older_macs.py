"""The sources need nothing that the oldest Xcode which builds the package lacks: that of macOS 13."""

import re
import shutil
from pathlib import Path

import check_metal_api
import check_sdks
import pytest
from apple_metadata import WHEELS, download
from support.missing import fail_or_skip
from support.places import ROOT

FOLDERS = [ROOT / "cpp", ROOT / "emulator" / "testing"]  # compiled on a Mac
NEEDED = "needs clang (Debian: apt-get install clang-19) and PyPI"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the bindings that list the contents of each SDK."""
    folder = tmp_path_factory.mktemp("sdks")
    try:
        if not any(shutil.which(name) for name in check_metal_api.COMPILERS):
            raise RuntimeError("no clang++")
        for sdk, version in check_sdks.SDKS.items():
            download(f"{WHEELS['Metal']}=={version}", folder / f"sdk-{sdk}")
    except RuntimeError as error:
        fail_or_skip(f"{NEEDED}: {error}", "METAL_PREFILL_REQUIRE_EMULATOR")
    return folder


def test_every_used_metal_api_is_in_every_sdk(cache: Path) -> None:
    assert check_sdks.check(FOLDERS, cache) == []


def test_names_that_an_older_sdk_lacks_are_found(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "new.mm").write_text(
        "bool b = [d supportsFamily:MTLGPUFamilyApple9];  // not MTLLanguageVersion3_2\n"
        "options.mathMode = MTLMathModeSafe;\n"
        'const char* text = "MTLMathModeFast";\n'
    )
    problems = check_sdks.check([tmp_path], cache)
    assert [problem.partition("new.mm:")[2] for problem in problems] == [
        "1: MTLGPUFamilyApple9 is not in the SDK of macOS 13",
        "2: mathMode is not in the SDK of macOS 13",
        "2: MTLMathModeSafe is not in the SDK of macOS 13",
        "2: mathMode is not in the SDK of macOS 14",
        "2: MTLMathModeSafe is not in the SDK of macOS 14",
    ]


# Features of C++20 and 23 missing from libc++ before 16: Xcode 14 has an earlier one. The list is that of
# libc++'s status page.
NEWER = re.compile(
    r"""\b(?:make_unique_for_overwrite|make_shared_for_overwrite|allocate_shared_for_overwrite)\b
    | \bstd::(?:format|vformat|ranges|views|source_location|jthread|stop_token|stop_source|expected
      |unexpected|move_only_function|print|println|mdspan|generator|flat_map|flat_set|syncstream|osyncstream|byteswap
      |assume_aligned|to_underlying|unreachable|lexicographical_compare_three_way|from_range|zoned_time
      |atomic_ref|chrono::parse|pmr::)""",
    re.VERBOSE,
)


def newer(text: str) -> list[str]:
    code = "\n".join(line.split("//")[0] for line in text.splitlines())
    return NEWER.findall(code)


def test_only_library_features_of_the_oldest_xcode_are_used() -> None:
    sources = [path for folder in FOLDERS for path in folder.rglob("*") if path.suffix in check_sdks.SUFFIXES]
    assert len(sources) > 80
    used = {path.name: found for path in sources if (found := newer(path.read_text()))}
    assert used == {}
