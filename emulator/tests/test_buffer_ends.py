"""Reads and writes past a buffer's end are found, also if the following memory is mapped."""

import mmap
import tempfile
from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary, encoded, u32

PAGE = mmap.PAGESIZE


def run(library: KernelLibrary, kernel: str, buffer: Any, position: int) -> Any:
    """Store 1 at a position, or load an element; returns the command buffer."""
    others = [u32(position), u32(1)]
    if kernel == "load":
        others = [library.device.new_buffer(16), u32(position)]
    with encoded(library.queue) as (command_buffer, encoder):
        library.encode(encoder, kernel, [buffer, *others], threads=1)
    return command_buffer


def names(error: str, kernel: str, argument: str) -> bool:
    """Return whether a message names kernel, dispatch and binding."""
    return all(part in error for part in (f"kernel '{kernel}'", "dispatch 0", f"'{argument}'"))


@pytest.mark.parametrize("length", [4, 40, 64, PAGE, PAGE + 4])
@pytest.mark.usefixtures("checked")
def test_the_last_element_is_accessible(device: Any, library: KernelLibrary, length: int) -> None:
    buffer = device.new_buffer(length)
    assert run(library, "store", buffer, length // 4 - 1).error == ""
    assert run(library, "load", buffer, length // 4 - 1).error == ""
    assert buffer.contents.view(np.uint32)[-1] == 1


@pytest.mark.parametrize("storage", ["shared", "private"])
@pytest.mark.parametrize("length", [4, 40, 64, PAGE, PAGE + 4])
@pytest.mark.usefixtures("guards")
def test_a_write_past_the_end_is_found(
    device: Any, library: KernelLibrary, storage: str, length: int
) -> None:
    buffer = device.new_buffer(length, storage=storage, label="small")
    command_buffer = run(library, "store", buffer, length // 4)
    assert command_buffer.status == "error"
    assert names(command_buffer.error, "store", "y")


@pytest.mark.parametrize("length", [64, PAGE])
@pytest.mark.usefixtures("guards")
def test_a_read_past_the_end_is_found(device: Any, library: KernelLibrary, length: int) -> None:
    command_buffer = run(library, "load", device.new_buffer(length), length // 4)
    assert command_buffer.status == "error"
    assert names(command_buffer.error, "load", "x")


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_finds_any_read_past_the_end(device: Any, library: KernelLibrary) -> None:
    for length, position in ((4, 1), (40, 10), (40, 11), (42, 10), (256, 100_000)):  # 42 cuts an element
        command_buffer = run(library, "load", device.new_buffer(length), position)
        assert names(command_buffer.error, "load", "x")


def file_mapping(shared: bool) -> np.ndarray[Any, Any]:
    """Return the bytes of a mapped file of four pages."""
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * PAGE)
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        return np.frombuffer(mmap.mmap(file.fileno(), 4 * PAGE, flags=flags), np.uint8)


def check_end_inside_mapping(library: KernelLibrary, memory: np.ndarray[Any, Any], write: bool) -> None:
    """Access the last element of a buffer on the second page, then the one after it."""
    buffer = library.device.new_buffer_no_copy(memory, offset=PAGE, length=PAGE)
    kernel, argument = ("store", "y") if write else ("load", "x")
    assert run(library, kernel, buffer, PAGE // 4 - 1).error == ""
    assert names(run(library, kernel, buffer, PAGE // 4).error, kernel, argument)
    assert memory.view(np.uint32)[PAGE // 2 - 1] == write
    assert not memory[2 * PAGE :].any()


@pytest.mark.parametrize("shared", [False, True], ids=["private mapping", "shared mapping"])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_finds_the_end_of_a_buffer_inside_a_larger_mapping(
    library: KernelLibrary, shared: bool, write: bool
) -> None:
    check_end_inside_mapping(library, file_mapping(shared), write)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.usefixtures("guards")
def test_the_end_of_a_buffer_inside_a_shared_mapping_is_guarded(library: KernelLibrary, write: bool) -> None:
    check_end_inside_mapping(library, file_mapping(shared=True), write)


@pytest.mark.usefixtures("guards")
def test_the_emulator_survives_an_error(device: Any, library: KernelLibrary) -> None:
    buffer = device.new_buffer(PAGE)
    for _ in range(20):
        assert run(library, "store", buffer, PAGE // 4).status == "error"
        assert run(library, "store", buffer, 3).status == "completed"
