"""Devices, buffers, libraries, pipelines, queues and command buffers behave as Metal documents."""

import mmap
import os
import weakref
from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary, encoded, u32

PAGE = mmap.PAGESIZE


def page_aligned(pages: int) -> np.ndarray[Any, Any]:
    """Return bytes that begin at a page."""
    return np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)


def test_all_devices_are_the_same_object(metal_testing: Any, device: Any, emulator: Any) -> None:
    other = metal_testing.Device()
    assert emulator.live_objects_by_class() == {"EmulatorDevice": 1}
    assert other.name == device.name


def test_shared_buffers_are_zeroed_and_visible(device: Any, emulator: Any) -> None:
    buffer = device.new_buffer(1000, label="x")
    (info,) = emulator.live_buffers()
    assert (info.length, info.storage_mode, info.label) == (1000, "shared", "x")
    assert buffer.length == 1000
    assert not buffer.contents.any()
    buffer.contents[999] = 7
    assert buffer.contents[999] == 7


def test_a_buffer_has_no_contents_of_freed_ones(device: Any) -> None:
    for _ in range(2):
        buffer = device.new_buffer(3 * PAGE)
        assert not buffer.contents.any()
        buffer.contents[:] = 7
        buffer.release()


def test_later_buffers_do_not_get_the_memory_of_no_copy_buffers(device: Any) -> None:
    memory = page_aligned(11)
    device.new_buffer_no_copy(memory).release()
    device.new_buffer(11 * PAGE).contents[:] = 7
    assert not memory.any()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_does_not_change_buffers_of_its_parent(device: Any) -> None:
    device.new_buffer(5 * PAGE).release()
    begun, begin = os.pipe()
    if (child := os.fork()) == 0:
        os.read(begun, 1)
        device.new_buffer(5 * PAGE).contents[:] = 9
        os._exit(0)
    buffer = device.new_buffer(5 * PAGE)
    buffer.contents[:] = 7
    os.write(begin, b"1")
    os.waitpid(child, 0)
    assert (buffer.contents == 7).all()
    for descriptor in (begun, begin):
        os.close(descriptor)


@pytest.mark.parametrize("size", [64, (3 << 20) + 64])
def test_private_buffers_are_initialized_with_nan(device: Any, library: KernelLibrary, size: int) -> None:
    private = device.new_buffer(size, storage="private")
    visible = device.new_buffer(size)
    with encoded(library.queue, "blit") as (_, encoder):
        encoder.copy(private, 0, visible, 0, size)
    assert np.isnan(visible.contents.view(np.float32)).all()


def test_buffers_copy_their_initial_bytes(device: Any) -> None:
    assert device.new_buffer_with_bytes(b"metal").contents.tobytes() == b"metal"


def test_no_copy_buffers_use_the_callers_memory(device: Any, library: KernelLibrary) -> None:
    memory = page_aligned(2)
    floats = memory.view(np.float32)
    floats[:] = 1
    buffer = device.new_buffer_no_copy(memory, offset=PAGE, length=PAGE)
    half = PAGE // 2
    with encoded(library.queue) as (command_buffer, encoder):
        library.encode(encoder, "add", [buffer, buffer, (buffer, half)], groups=half // 256, threads=64)
    assert command_buffer.error == ""
    assert (floats[: (PAGE + half) // 4] == 1).all()
    assert (floats[(PAGE + half) // 4 :] == 2).all()


def test_the_deallocator_runs_when_the_buffer_is_released(device: Any, emulator: Any) -> None:
    memory = page_aligned(1)
    alive = weakref.ref(memory)
    buffer = device.new_buffer_no_copy(memory)
    del memory
    assert [info.no_copy for info in emulator.live_buffers()] == [True]
    assert alive() is not None
    del buffer
    assert emulator.live_buffers() == []
    assert alive() is None


def test_literals_and_enumeration_are_those_of_objective_c(metal_testing: Any) -> None:
    assert metal_testing.literals(12) == ["", "1", "a longer literal"] * 12


def test_library_lists_its_functions(library: KernelLibrary) -> None:
    expected = (
        "add scale negate4 reverse static_scratch store store_twice load limited exponentials matrix_places"
    )
    assert sorted(library.library.function_names) == sorted([*expected.split(), "part_one", "part_two"])


def test_a_text_that_does_not_compile_is_an_error(metal_testing: Any, device: Any) -> None:
    with pytest.raises(metal_testing.MetalError, match="newLibraryWithSource"):
        device.new_library("kernel void broken( {")


def test_a_library_file_is_an_error(metal_testing: Any, device: Any) -> None:
    with pytest.raises(metal_testing.MetalError, match=r"reads no library: '/nowhere\.metallib'"):
        device.load_library("/nowhere.metallib")


def test_an_unknown_function_is_an_error(metal_testing: Any, library: KernelLibrary) -> None:
    with pytest.raises(metal_testing.MetalError, match="no function 'divide'"):
        library.library.new_function("divide")


def test_pipelines_have_their_limits(device: Any, library: KernelLibrary) -> None:
    pipeline = library.pipeline("static_scratch")
    assert (pipeline.max_threads, pipeline.execution_width) == (1024, 32)
    assert library.pipeline("limited").max_threads == 64
    function = library.library.new_function("add")
    assert device.new_pipeline(function, max_threads=128).max_threads == 128


def test_a_command_buffer_passes_through_its_states(library: KernelLibrary) -> None:
    command_buffer = library.queue.command_buffer()
    assert command_buffer.status == "not enqueued"
    command_buffer.commit()
    command_buffer.wait()
    assert command_buffer.status == "completed"
    assert 0 < command_buffer.gpu_start <= command_buffer.gpu_end


@pytest.mark.parametrize("asks", [False, True])
def test_a_wait_is_counted_unless_the_host_has_seen_the_completion(
    library: KernelLibrary, emulator: Any, asks: bool
) -> None:
    command_buffer = library.queue.command_buffer()
    command_buffer.commit()
    emulator.live_objects()  # waits until it has completed, unseen by the program
    before = emulator.counters().waits
    if asks:
        assert command_buffer.status == "completed"
    for _ in range(2):
        command_buffer.wait()
        assert emulator.counters().waits - before == int(not asks)


def test_blit_encoders_copy_and_fill(device: Any, library: KernelLibrary) -> None:
    a, b = device.new_buffer_with_bytes(bytes(range(16))), device.new_buffer(16)
    with encoded(library.queue, "blit") as (_, encoder):
        encoder.fill(b, 0, 16, 0xEE)
        encoder.copy(a, 4, b, 8, 4)
    assert b.contents.tolist() == [0xEE] * 8 + [4, 5, 6, 7] + [0xEE] * 4


def test_retained_buffers_live_until_the_command_buffer_completes(
    device: Any, library: KernelLibrary, emulator: Any
) -> None:
    source, target = device.new_buffer_with_bytes(b"abcd"), device.new_buffer(4)
    command_buffer = library.queue.command_buffer()
    encoder = command_buffer.blit_encoder()
    encoder.copy(source, 0, target, 0, 4)
    encoder.end()
    del source
    assert len(emulator.live_buffers()) == 2
    command_buffer.commit()
    command_buffer.wait()
    assert target.contents.tobytes() == b"abcd"
    assert len(emulator.live_buffers()) == 1


def test_a_retained_pipeline_lives_until_the_command_buffer_completes(
    device: Any, library: KernelLibrary, emulator: Any
) -> None:
    buffer = device.new_buffer(256)
    command_buffer = library.queue.command_buffer()
    encoder = command_buffer.compute_encoder()
    library.encode(encoder, "limited", [buffer], threads=64)
    encoder.end()
    del encoder
    assert emulator.live_objects_by_class()["EmulatorComputePipeline"] == 1
    command_buffer.commit()
    command_buffer.wait()
    assert buffer.contents.view(np.uint32).tolist() == list(range(64))
    assert "EmulatorComputePipeline" not in emulator.live_objects_by_class()


def test_dispatches_before_a_fault_take_effect(device: Any, library: KernelLibrary, emulator: Any) -> None:
    buffer = device.new_buffer(8)
    emulator.fail_command_buffer(1, "half way", dispatches=1)
    with encoded(library.queue) as (command_buffer, encoder):
        for position in range(2):
            library.encode(encoder, "store", [buffer, u32(position), u32(9)], threads=1)
    assert command_buffer.error == "half way"
    assert buffer.contents.view(np.uint32).tolist() == [9, 0]


def test_fast_exponentials_have_the_maximum_error_on_request(library: KernelLibrary, emulator: Any) -> None:
    """The error is 3 + |2x| units of the last place, up or down.

    The power of 0 stays 1; results that are infinite or 0 keep their value or become a neighbour.
    """
    x = np.linspace(-60, 60, 241, dtype=np.float32)
    y = np.zeros((len(x), 4), np.float32)
    library.dispatch("exponentials", [x, y], groups=1, threads=len(x))
    exact = y.copy()
    np.testing.assert_array_equal(exact[:, 0], exact[:, 1])
    np.testing.assert_allclose(exact[:, 2], np.exp2(x), rtol=1e-6)
    emulator.set_options(emulator.Options(fast_errors=True))
    library.dispatch("exponentials", [x, y], groups=1, threads=len(x))
    np.testing.assert_array_equal(y[:, 0], exact[:, 0])  # precise::
    # Positive floats are in the order of their bits.
    moved = y[:, 1:3].view(np.int32) - exact[:, 1:3].view(np.int32)
    units = np.where(x == 0, 0, 3 + np.floor(np.abs(2 * x)))
    np.testing.assert_array_equal(np.abs(moved), np.repeat(units[:, None], 2, axis=1))
    assert 0.3 < (moved > 0).mean() < 0.7
    ends = np.array([89, -200], np.float32)
    y = np.zeros((len(ends), 4), np.float32)
    library.dispatch("exponentials", [ends, y], groups=1, threads=len(ends))
    assert y[0, 1] == np.inf
    assert 0 <= y[1, 1] < 1e-40


def test_fast_functions_of_an_infinity_are_nan(library: KernelLibrary) -> None:
    """Metal does not define their results, and leaves infinities to the other functions."""
    x = np.array([np.inf, -np.inf, -1e30, 3], np.float32)
    y = np.zeros((len(x), 4), np.float32)
    library.dispatch("exponentials", [x, y], groups=1, threads=len(x))
    np.testing.assert_array_equal(y[:3, 0], [np.inf, 0, 0])  # precise::
    assert np.isnan(y[:2, 1:]).all()
    np.testing.assert_allclose(y[3], [np.exp(3), np.exp(3), 8, np.exp(3)], rtol=1e-3)


# The lane of each pair of adjacent elements of rows or columns, in the order of the matrix.
LANES = {
    "APPLE": [first + lane for first in (0, 2, 4, 6, 16, 18, 20, 22) for lane in (0, 1, 8, 9)],
    "CONSECUTIVE": [*range(32)],
    "SHIFTED": [31, *range(31)],
    "COLUMNS": [column + lane for column in range(8) for lane in (0, 8, 16, 24)],
}


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("layout", LANES)
def test_lanes_hold_the_elements_of_a_matrix_that_the_layout_sets(
    library: KernelLibrary, emulator: Any, layout: str, seed: int
) -> None:
    """Results do not depend on the layout, unless a kernel determines a lane's elements."""
    options = emulator.Options(seed=seed, matrix_layout=getattr(emulator.MatrixLayout, layout))
    emulator.set_options(options)
    x = np.random.default_rng(1).integers(-9, 9, (8, 8)).astype(np.float32)
    mine, out = np.zeros((32, 2), np.float32), np.zeros((2, 8, 8), np.float32)
    library.dispatch("matrix_places", [x, mine, out], groups=1, threads=32)
    pairs = (x.T if layout == "COLUMNS" else x).reshape(32, 2)
    np.testing.assert_array_equal(mine[LANES[layout]], pairs)
    np.testing.assert_array_equal(out[0], -x)
    np.testing.assert_array_equal(out[1], x @ x.T + x)


def test_lanes_hold_the_elements_that_those_of_apple_hold_by_default(emulator: Any) -> None:
    assert emulator.Options().matrix_layout == emulator.MatrixLayout.APPLE


def test_history_lists_dispatches(library: KernelLibrary, emulator: Any) -> None:
    emulator.set_history_depth(1)
    library.dispatch("add", [np.ones(100, np.float32)] * 3, groups=4, threads=25)
    (record,) = emulator.history()
    (dispatch,) = record.dispatches
    assert (dispatch.kernel, dispatch.grid, dispatch.group) == ("add", (4, 1, 1), (25, 1, 1))
    assert dispatch.threads == 100
    assert [(binding.index, binding.name) for binding in dispatch.bindings] == [
        (0, "a"),
        (1, "b"),
        (2, "sum"),
    ]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_counts_the_bytes_of_each_binding(
    library: KernelLibrary, emulator: Any, workers: int
) -> None:
    emulator.set_options(emulator.Options(checked=True, workers=workers))
    emulator.set_history_depth(1)
    library.dispatch("add", [np.ones(100, np.float32)] * 3, groups=4, threads=25)
    bindings = emulator.history()[0].dispatches[0].bindings
    expected = [(400, 0), (400, 0), (0, 400)]
    assert [(b.bytes_read, b.bytes_written) for b in bindings] == expected
    assert [(b.unique_bytes_read, b.unique_bytes_written) for b in bindings] == expected
