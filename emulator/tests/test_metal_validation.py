"""Misuse that Apple's validation layer aborts on is a precise error at the call."""

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary

PAGE = mmap.PAGESIZE


class Setup:
    """An open encoder with everything that `add` requires; each test breaks one part."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self.buffers = [library.device.new_buffer(256, label=f"buffer {i}") for i in range(3)]
        self.command_buffer = library.queue.command_buffer()
        self.encoder = self.command_buffer.compute_encoder()
        self.use("add")
        for index, buffer in enumerate(self.buffers):
            self.encoder.set_buffer(index, buffer)

    def use(self, kernel: str) -> None:
        """Set the pipeline."""
        self.encoder.set_pipeline(self.library.pipeline(kernel))

    def dispatch(self, groups: int = 2, threads: int = 32) -> None:
        """Run 64 threads."""
        self.encoder.dispatch_threadgroups((groups, 1, 1), (threads, 1, 1))

    def finish(self) -> Any:
        """Commit and wait."""
        self.end()
        self.command_buffer.commit()
        self.command_buffer.wait()
        return self.command_buffer

    def end(self) -> None:
        """End encoding, once."""
        if self.encoder is not None:
            self.encoder.end()
        self.encoder = None


@pytest.fixture
def case(library: KernelLibrary) -> Iterator[Setup]:
    setup = Setup(library)
    yield setup
    setup.end()
    vars(setup).clear()  # pytest refers to it until the emulator has looked for live objects


@pytest.fixture
def refuses(emulator: Any) -> Callable[[str], Any]:
    """Context in which a call must fail with a matching message."""
    return lambda pattern: pytest.raises(emulator.ValidationError, match=pattern)


def test_the_unmodified_setup_is_valid(case: Setup) -> None:
    case.dispatch()
    assert case.finish().status == "completed"


def test_missing_binding(case: Setup, refuses: Any) -> None:
    case.dispatch()
    case.encoder.set_buffer(1, None)
    with refuses(r"kernel 'add', dispatch 1, buffer\(1\) 'b': nothing is bound"):
        case.dispatch()


def test_bytes_for_a_writable_argument(case: Setup, refuses: Any) -> None:
    case.encoder.set_bytes(2, bytes(256))
    with refuses(r"buffer\(2\) 'sum': the kernel writes to it, but it was bound by setBytes"):
        case.dispatch()


def test_struct_argument_that_is_too_short(case: Setup, refuses: Any) -> None:
    case.use("scale")
    case.encoder.set_bytes(2, bytes(4))
    with refuses(r"buffer\(2\) 'args': holds 4 bytes from offset 0, the argument needs 8"):
        case.dispatch()


@pytest.mark.parametrize(
    ("kernel", "index", "offset", "unit"), [("add", 0, 2, 4), ("negate4", 1, 8, 16), ("scale", 2, 128, 256)]
)
def test_misaligned_offset(
    case: Setup, refuses: Any, kernel: str, index: int, offset: int, unit: int
) -> None:
    case.use(kernel)
    case.encoder.set_buffer(index, case.buffers[index], offset)
    with refuses(rf"kernel '{kernel}', .*buffer\({index}\).*offset {offset} is not a multiple of {unit}"):
        case.dispatch()


def test_offset_outside_the_buffer(case: Setup, refuses: Any) -> None:
    with refuses("setBuffer: offset 256 at index 0 lies outside the buffer of 256 bytes"):
        case.encoder.set_buffer(0, case.buffers[0], 256)


def test_a_buffer_that_is_written_and_bound_twice(case: Setup, refuses: Any) -> None:
    case.encoder.set_buffer(1, case.buffers[2])
    with refuses(r"kernel 'add', dispatch 0, buffer\(2\) 'sum': is written, and overlaps buffer\(1\) 'b'"):
        case.dispatch()
    case.encoder.set_buffer(1, case.buffers[0])  # which is read twice
    case.dispatch()
    case.encoder.set_buffer(1, case.buffers[2], 128)  # another part
    case.dispatch(1)


def test_contents_of_a_private_buffer(device: Any, refuses: Any) -> None:
    private = device.new_buffer(64, storage="private")
    with refuses("contents: the buffer is MTLStorageModePrivate"):
        _ = private.contents


def test_more_than_31_buffers(case: Setup, refuses: Any) -> None:
    case.encoder.set_buffer(30, case.buffers[0])
    with refuses("setBuffer: index 31 is not below 31"):
        case.encoder.set_buffer(31, case.buffers[0])
    with refuses("setBytes: index 31 is not below 31"):
        case.encoder.set_bytes(31, b"1234")


def test_more_than_4_kb_of_bytes(case: Setup, refuses: Any) -> None:
    case.encoder.set_bytes(0, bytes(4096))
    with refuses("setBytes: 4097 bytes at index 0 exceed the limit of 4096"):
        case.encoder.set_bytes(0, bytes(4097))
    with refuses("setBytes: no bytes"):
        case.encoder.set_bytes(0, b"")


def test_empty_grid_or_threadgroup(case: Setup, refuses: Any) -> None:
    with refuses("kernel 'add', dispatch 0: the grid 0x1x1 is empty"):
        case.dispatch(0)
    with refuses("kernel 'add', dispatch 0: the threadgroup 0x1x1 is empty"):
        case.dispatch(threads=0)
    with refuses("the grid 1x0x1 is empty"):
        case.encoder.dispatch_threadgroups((1, 0, 1), (1, 1, 1))


def test_too_many_threads(case: Setup, refuses: Any) -> None:
    with refuses("the threadgroup 32x33x1 exceeds the pipeline's limit of 1024 threads"):
        case.encoder.dispatch_threadgroups((1, 1, 1), (32, 33, 1))
    case.use("limited")
    with refuses("kernel 'limited', dispatch 0: the threadgroup 65x1x1 exceeds the pipeline's limit of 64"):
        case.dispatch(threads=65)
    function = case.library.library.new_function("add")
    case.encoder.set_pipeline(case.library.device.new_pipeline(function, max_threads=16))
    with refuses("exceeds the pipeline's maxTotalThreadsPerThreadgroup of 16"):
        case.dispatch(threads=17)


def test_no_pipeline(library: KernelLibrary, refuses: Any) -> None:
    command_buffer = library.queue.command_buffer()
    encoder = command_buffer.compute_encoder()
    with refuses("dispatchThreadgroups: no compute pipeline state is set"):
        encoder.dispatch_threadgroups((1, 1, 1), (1, 1, 1))
    encoder.end()


def test_threadgroup_memory(case: Setup, refuses: Any) -> None:
    case.use("reverse")
    with refuses(r"kernel 'reverse', dispatch 0, threadgroup\(0\) 'scratch': has 0 bytes"):
        case.dispatch()
    with refuses("setThreadgroupMemoryLength: 24 at index 0 is not a multiple of 16"):
        case.encoder.set_threadgroup_memory(0, 24)
    with refuses("32784 bytes at index 0 exceed the limit of 32768"):
        case.encoder.set_threadgroup_memory(0, 32784)
    case.use("static_scratch")
    case.encoder.set_threadgroup_memory(0, 32768 - 4096 + 16)
    with refuses(
        "kernel 'static_scratch', dispatch 0: 32784 bytes of threadgroup memory exceed the limit of 32768"
    ):
        case.dispatch()
    case.encoder.set_threadgroup_memory(0, 32768 - 4096)
    case.dispatch()
    assert case.finish().status == "completed"


def test_use_after_end_encoding(case: Setup, refuses: Any) -> None:
    encoder = case.encoder
    case.end()
    for call, name in (
        (lambda: encoder.set_buffer(0, None), "setBuffer"),
        (lambda: encoder.set_bytes(0, b"1234"), "setBytes"),
        (lambda: encoder.dispatch_threadgroups((1, 1, 1), (1, 1, 1)), "dispatchThreadgroups"),
        (encoder.barrier, "memoryBarrierWithScope"),
        (encoder.end, "endEncoding"),
    ):
        with refuses(f"{name}: the encoder has ended encoding"):
            call()


def test_encoder_released_without_end_encoding(library: KernelLibrary, emulator: Any, refuses: Any) -> None:
    setup = Setup(library)
    command_buffer = setup.command_buffer
    del setup
    with refuses("commit: an encoder was released without endEncoding"):
        command_buffer.commit()
    with refuses("earlier: an encoder was released without endEncoding"):
        library.queue.command_buffer()
    assert emulator.take_violations() == []


def test_two_encoders_at_once(case: Setup, refuses: Any) -> None:
    with refuses("blitCommandEncoder: another encoder has not ended encoding"):
        case.command_buffer.blit_encoder()
    with refuses("commit: an encoder of the command buffer has not ended encoding"):
        case.command_buffer.commit()


def test_command_buffer_used_out_of_order(library: KernelLibrary, refuses: Any) -> None:
    command_buffer = library.queue.command_buffer()
    with refuses("waitUntilCompleted: the command buffer was not committed"):
        command_buffer.wait()
    command_buffer.commit()
    command_buffer.wait()
    for call, name in (
        (command_buffer.commit, "commit"),
        (command_buffer.compute_encoder, "computeCommandEncoder"),
    ):
        with refuses(f"{name}: the command buffer was already committed"):
            call()


def test_more_command_buffers_than_the_queue_has(device: Any, refuses: Any) -> None:
    queue = device.new_queue()
    held = [queue.command_buffer() for _ in range(64)]
    with refuses("would block forever: the queue's 64 command buffers are all in use"):
        queue.command_buffer()
    held.pop()
    queue.command_buffer()


def test_buffer_lengths(device: Any, emulator: Any, refuses: Any) -> None:
    with refuses("newBufferWithLength: length is 0"):
        device.new_buffer(0)
    emulator.set_limits(emulator.Limits(max_buffer_length=4096))
    assert device.max_buffer_length == 4096
    with refuses("newBufferWithLength: length 4097 exceeds maxBufferLength 4096"):
        device.new_buffer(4097)
    with refuses("newBufferWithLength: the storage mode of the options 16 is neither Shared nor Private"):
        device.new_buffer(16, storage="managed")


def test_no_copy_buffers_require_whole_pages(device: Any, refuses: Any) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * PAGE), np.uint8)
    with refuses("newBufferWithBytesNoCopy: pointer is NULL or not a multiple of the page size"):
        device.new_buffer_no_copy(memory, offset=64, length=PAGE)
    with refuses(f"newBufferWithBytesNoCopy: length {PAGE + 4} is not a multiple of the page size"):
        device.new_buffer_no_copy(memory, length=PAGE + 4)


def test_blit_ranges(device: Any, library: KernelLibrary, refuses: Any) -> None:
    a, b = device.new_buffer(16), device.new_buffer(8)
    command_buffer = library.queue.command_buffer()
    encoder = command_buffer.blit_encoder()
    with refuses("copyFromBuffer: destination bytes 4 to 12 of a buffer of 8"):
        encoder.copy(a, 0, b, 4, 8)
    with refuses("copyFromBuffer: source bytes 12 to 20 of a buffer of 16"):
        encoder.copy(a, 12, b, 0, 8)
    with refuses("copyFromBuffer: source and destination overlap"):
        encoder.copy(a, 0, a, 4, 8)
    with refuses("fillBuffer: range: bytes 8 to 24 of a buffer of 16"):
        encoder.fill(a, 8, 16, 0)
    with refuses("copyFromBuffer: size is 0"):
        encoder.copy(a, 0, b, 0, 0)
    with refuses("copyFromBuffer: 2 is not a multiple of 4 bytes"):
        encoder.copy(a, 2, b, 0, 4)
    with refuses("copyFromBuffer: 6 is not a multiple of 4 bytes"):
        encoder.copy(a, 0, b, 0, 6)
    with refuses("fillBuffer: 10 is not a multiple of 4 bytes"):
        encoder.fill(a, 0, 10, 0)
    encoder.end()


def test_unretained_buffer_that_is_freed_before_commit(
    device: Any, library: KernelLibrary, refuses: Any
) -> None:
    command_buffer = library.queue.command_buffer(retained=False)
    encoder = command_buffer.compute_encoder()
    buffer = device.new_buffer(16, label="short-lived")
    library.encode(encoder, "limited", [buffer], threads=4)
    encoder.end()
    del buffer
    with refuses(
        r"commit: kernel 'limited', dispatch 0, buffer\(0\) 'y' = \"short-lived\": the buffer was deallocated"
    ):
        command_buffer.commit()
