"""Devices with fewer capabilities than the emulator's default, as in virtual machines and on other GPUs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary, encoded

pytestmark = pytest.mark.emulator
KERNELS = Path(__file__).parent / "kernels"


def test_a_custom_name_does_not_hide_the_emulator(device: Any, emulator: Any) -> None:
    assert "emulator" in device.name.lower()
    emulator.set_limits(emulator.Limits(name="Apple Paravirtual device", apple_family=5))
    assert device.name.startswith("Apple Paravirtual device (")
    assert "emulator" in device.name.lower()
    assert not device.supports_family(1006)


def store(library: KernelLibrary) -> None:
    """Store four numbers."""
    library.dispatch("store", [np.zeros(4, np.uint32), np.uint32(0), np.uint32(0)], groups=1, threads=4)


def test_the_watchdog_aborts_command_buffers_after_a_number_of_steps(
    library: KernelLibrary, emulator: Any
) -> None:
    emulator.set_limits(emulator.Limits(watchdog_steps=3))
    with pytest.raises(RuntimeError, match=r"GPU Timeout Error: .*'store'.*: 4 steps"):
        store(library)
    emulator.set_limits(emulator.Limits(watchdog_steps=4))
    store(library)


def test_command_buffers_beyond_the_working_set_fail(library: KernelLibrary, emulator: Any) -> None:
    emulator.set_limits(emulator.Limits(working_set_bytes=15, out_of_memory=True))
    with pytest.raises(RuntimeError, match=r"OutOfMemory.*buffers of 16 bytes are beyond .* of 15"):
        store(library)
    emulator.set_limits(emulator.Limits(working_set_bytes=16, out_of_memory=True))
    store(library)
    emulator.set_limits(emulator.Limits(working_set_bytes=15))  # recommended, and no more
    store(library)


def test_exact_functions_are_a_separate_option(library: KernelLibrary, emulator: Any) -> None:
    (default,) = emulator.compiled_libraries()[-1:]
    assert (default.fast_math, default.fast_functions) == (True, True)
    assert default.language > (3, 1)  # the newest
    exact = KernelLibrary((KERNELS / "host_api.metal").read_text(), fast_math=False)
    (compiled,) = emulator.compiled_libraries()[-1:]
    assert (compiled.fast_math, compiled.fast_functions) == (False, False)
    exact.close()


def test_large_no_copy_buffers_can_read_stale_data(
    device: Any, library: KernelLibrary, emulator: Any
) -> None:
    memory = np.ones(4 * 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][: 2 * 4096]

    def seen(limit: int) -> list[int]:
        emulator.set_limits(emulator.Limits(stale_no_copy=limit))
        buffer, copy = device.new_buffer_no_copy(memory), device.new_buffer(memory.size)
        with encoded(library.queue, "blit") as (_, blit):
            blit.copy(buffer, 0, copy, 0, memory.size)
        np.testing.assert_array_equal(buffer.contents, memory)
        read = copy.contents
        return [int(read[:4096].sum()), int(read[4096:].sum())]

    assert seen(limit=0) == seen(limit=2 * 4096) == [4096, 4096]
    assert seen(limit=4096) == [4096, 0]


def test_opening_an_archive_can_abort(
    device: Any, library: KernelLibrary, emulator: Any, tmp_path: Path
) -> None:
    emulator.set_limits(emulator.Limits(binary_archives=False))
    archive = device.new_archive()
    archive.add(library.library.new_function("store"))
    with pytest.raises(RuntimeError, match="no binary archives"):
        archive.write(str(tmp_path / "file"))
    with pytest.raises(emulator.ValidationError, match="Target device architecture is nil"):
        device.new_archive(str(tmp_path / "file"))


def test_older_families_have_no_residency_sets(device: Any, emulator: Any) -> None:
    emulator.set_limits(emulator.Limits(apple_family=6))
    device.new_residency_set()
    emulator.set_limits(emulator.Limits(apple_family=5))
    with pytest.raises(
        emulator.ValidationError, match=r"newResidencySet.* needs .* Apple6 or later; .* Apple5"
    ):
        device.new_residency_set()
