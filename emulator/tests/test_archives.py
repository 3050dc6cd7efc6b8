"""Macros that select kernels, archives of compiled pipelines, and residency sets."""

from pathlib import Path
from typing import Any

import pytest
from metal_kernels import KernelLibrary

SOURCE = (Path(__file__).parent / "kernels" / "host_api.metal").read_text()


def parts(device: Any, **macros: str) -> set[str]:
    """Return the kernels of a library that macros select."""
    library = device.new_library(SOURCE, macros=macros)
    return {name for name in library.function_names if name.startswith("part_")}


def test_macros_select_the_same_kernels_as_a_compiler(device: Any) -> None:
    assert parts(device) == {"part_one", "part_two"}
    assert parts(device, ONLY_PARTS="1") == set()
    assert parts(device, ONLY_PARTS="1", WITH_TWO="1") == {"part_two"}
    library = device.new_library(SOURCE, macros={"ONLY_PARTS": "1", "WITH_TWO": "1"})
    assert "store" in library.function_names
    with pytest.raises(RuntimeError, match="no function 'part_one'"):
        library.new_function("part_one")


@pytest.mark.parametrize(
    ("macros", "why"),
    [
        ({"WITH_ONE": "1"}, "macros without the guard"),
        ({"ONLY_PARTS": "1", "WITH_THREE": "1"}, "'WITH_THREE' selects nothing"),
        ({"ONLY_PARTS": "1", "WITH_ONE": "2"}, "'WITH_ONE' is '2' instead of 1"),
    ],
    ids=["no guard", "unknown", "another value"],
)
def test_other_macros_need_a_compiler(device: Any, macros: dict[str, str], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        device.new_library(SOURCE, macros=macros)


def test_an_archive_contains_added_pipelines_also_after_loading(
    device: Any, library: KernelLibrary, emulator: Any, tmp_path: Path
) -> None:
    archive, function = device.new_archive(), library.library.new_function("store")
    with pytest.raises(RuntimeError, match="no archive has the pipeline of 'store'"):
        device.archived_pipeline(function, archive)
    before = emulator.counters().compiled_pipelines
    archive.add(function)
    assert emulator.counters().compiled_pipelines == before + 1
    device.archived_pipeline(function, archive)
    archive.write(str(tmp_path / "file"))
    read = device.new_archive(str(tmp_path / "file"))
    device.archived_pipeline(function, read)
    assert emulator.counters().compiled_pipelines == before + 1
    with pytest.raises(RuntimeError, match="'load'"):
        device.archived_pipeline(library.library.new_function("load"), read)
    emulator.set_limits(emulator.Limits(name="another"))
    with pytest.raises(RuntimeError, match="'store'"):
        device.archived_pipeline(function, read)


@pytest.mark.parametrize("at", [0, -30, -2])
def test_a_damaged_archive_is_refused(device: Any, library: KernelLibrary, tmp_path: Path, at: int) -> None:
    archive = device.new_archive()
    archive.add(library.library.new_function("store"))
    path = tmp_path / "file"
    archive.write(str(path))
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match="damaged"):
        device.new_archive(str(path))
    with pytest.raises(RuntimeError, match="no file"):
        device.new_archive(str(tmp_path / "missing"))


def test_an_archive_that_cannot_be_written_is_an_error(
    device: Any, library: KernelLibrary, tmp_path: Path
) -> None:
    archive = device.new_archive()
    with pytest.raises(RuntimeError, match="nothing to serialize"):
        archive.write(str(tmp_path / "file"))
    archive.add(library.library.new_function("store"))
    with pytest.raises(RuntimeError, match="cannot write"):
        archive.write(str(tmp_path / "missing" / "file"))


def test_memory_is_resident_after_commit_and_request(device: Any, emulator: Any) -> None:
    residency, first, second = device.new_residency_set(), device.new_buffer(100), device.new_buffer(11)
    residency.add(first)
    residency.add(second)
    residency.request()
    assert emulator.resident_bytes() == 0
    residency.commit()
    assert emulator.resident_bytes() == 111
    residency.remove(first)
    assert emulator.resident_bytes() == 111
    residency.commit()
    assert emulator.resident_bytes() == 11
    residency.end()
    assert emulator.resident_bytes() == 0
    with pytest.raises(emulator.ValidationError, match="endResidency"):
        residency.end()
    residency.request()
    del residency
    assert emulator.resident_bytes() == 0
