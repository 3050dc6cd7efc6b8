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

    def use(self, kernel: str, **limits: int) -> "Setup":
        """Set the pipeline."""
        function = self.library.library.new_function(kernel)
        self.encoder.set_pipeline(self.library.device.new_pipeline(function, **limits))
        return self

    def bind(self, index: int, buffer: int, offset: int = 0) -> "Setup":
        """Set a buffer by its number."""
        self.encoder.set_buffer(index, self.buffers[buffer], offset)
        return self

    def dispatch(self, groups: int = 2, threads: int = 32) -> "Setup":
        """Run 64 threads."""
        self.encoder.dispatch_threadgroups((groups, 1, 1), (threads, 1, 1))
        return self

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


# By name: calls, the last of which is refused, and the message.
REFUSED: dict[str, tuple[Callable[[Setup], object], str]] = {
    "missing binding": (
        lambda c: (c.dispatch(), c.encoder.set_buffer(1, None), c.dispatch()),
        r"kernel 'add', dispatch 1, buffer\(1\) 'b': nothing is bound",
    ),
    "bytes for a writable argument": (
        lambda c: (c.encoder.set_bytes(2, bytes(256)), c.dispatch()),
        r"buffer\(2\) 'sum': the kernel writes to it, but it was bound by setBytes",
    ),
    "struct argument that is too short": (
        lambda c: (c.use("scale"), c.encoder.set_bytes(2, bytes(4)), c.dispatch()),
        r"buffer\(2\) 'args': holds 4 bytes from offset 0, the argument needs 8",
    ),
    "misaligned float": (
        lambda c: c.bind(0, 0, 2).dispatch(),
        r"kernel 'add', .*buffer\(0\).*offset 2 is not a multiple of 4",
    ),
    "misaligned vector": (
        lambda c: c.use("negate4").bind(1, 1, 8).dispatch(),
        r"kernel 'negate4', .*buffer\(1\).*offset 8 is not a multiple of 16",
    ),
    "misaligned constant": (
        lambda c: c.use("scale").bind(2, 2, 128).dispatch(),
        r"kernel 'scale', .*buffer\(2\).*offset 128 is not a multiple of 256",
    ),
    "offset outside the buffer": (
        lambda c: c.bind(0, 0, 256),
        "setBuffer: offset 256 at index 0 lies outside the buffer of 256 bytes",
    ),
    "a buffer that is written and bound twice": (
        lambda c: c.bind(1, 2).dispatch(),
        r"kernel 'add', dispatch 0, buffer\(2\) 'sum': is written, and overlaps buffer\(1\) 'b'",
    ),
    "more than 31 buffers": (lambda c: c.bind(31, 0), "setBuffer: index 31 is not below 31"),
    "bytes at index 31": (lambda c: c.encoder.set_bytes(31, b"1234"), "setBytes: index 31 is not below 31"),
    "more than 4 KB of bytes": (
        lambda c: c.encoder.set_bytes(0, bytes(4097)),
        "setBytes: 4097 bytes at index 0 exceed the limit of 4096",
    ),
    "no bytes": (lambda c: c.encoder.set_bytes(0, b""), "setBytes: no bytes"),
    "empty grid": (lambda c: c.dispatch(0), "kernel 'add', dispatch 0: the grid 0x1x1 is empty"),
    "empty threadgroup": (lambda c: c.dispatch(threads=0), "dispatch 0: the threadgroup 0x1x1 is empty"),
    "grid without rows": (
        lambda c: c.encoder.dispatch_threadgroups((1, 0, 1), (1, 1, 1)),
        "the grid 1x0x1 is empty",
    ),
    "too many threads": (
        lambda c: c.encoder.dispatch_threadgroups((1, 1, 1), (32, 33, 1)),
        "the threadgroup 32x33x1 exceeds the pipeline's limit of 1024 threads",
    ),
    "more threads than the kernel allows": (
        lambda c: c.use("limited").dispatch(threads=65),
        "kernel 'limited', dispatch 0: the threadgroup 65x1x1 exceeds the pipeline's limit of 64",
    ),
    "more threads than the pipeline allows": (
        lambda c: c.use("add", max_threads=16).dispatch(threads=17),
        "exceeds the pipeline's maxTotalThreadsPerThreadgroup of 16",
    ),
    "no threadgroup memory": (
        lambda c: c.use("reverse").dispatch(),
        r"kernel 'reverse', dispatch 0, threadgroup\(0\) 'scratch': has 0 bytes",
    ),
    "odd threadgroup memory": (
        lambda c: c.encoder.set_threadgroup_memory(0, 24),
        "setThreadgroupMemoryLength: 24 at index 0 is not a multiple of 16",
    ),
    "too much threadgroup memory": (
        lambda c: c.encoder.set_threadgroup_memory(0, 32784),
        "32784 bytes at index 0 exceed the limit of 32768",
    ),
    "too much threadgroup memory together": (
        lambda c: (
            c.use("static_scratch"),
            c.encoder.set_threadgroup_memory(0, 32768 - 4096 + 16),
            c.dispatch(),
        ),
        "'static_scratch', dispatch 0: 32784 bytes of threadgroup memory exceed the limit of 32768",
    ),
    "another encoder": (
        lambda c: c.command_buffer.blit_encoder(),
        "blitCommandEncoder: another encoder has not ended encoding",
    ),
    "commit of an open encoder": (
        lambda c: c.command_buffer.commit(),
        "commit: an encoder of the command buffer has not ended encoding",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused(case: Setup, refuses: Any, name: str) -> None:
    calls, message = REFUSED[name]
    with refuses(message):
        calls(case)


def test_values_at_the_limits_are_accepted(case: Setup) -> None:
    case.encoder.set_bytes(0, bytes(4096))
    case.dispatch()
    for index, buffer in ((0, 0), (1, 0), (30, 0)):  # one buffer that is read twice
        case.bind(index, buffer)
    case.dispatch()
    case.bind(1, 2, 128)  # another part of the buffer that is written
    case.dispatch(1)
    case.use("static_scratch")
    case.encoder.set_threadgroup_memory(0, 32768 - 4096)
    case.dispatch()
    assert case.finish().status == "completed"


def test_no_pipeline(library: KernelLibrary, refuses: Any) -> None:
    command_buffer = library.queue.command_buffer()
    encoder = command_buffer.compute_encoder()
    with refuses("dispatchThreadgroups: no compute pipeline state is set"):
        encoder.dispatch_threadgroups((1, 1, 1), (1, 1, 1))
    encoder.end()


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


def test_buffers(device: Any, emulator: Any, refuses: Any) -> None:
    emulator.set_limits(emulator.Limits(max_buffer_length=4 * PAGE))
    assert device.max_buffer_length == 4 * PAGE
    memory = np.frombuffer(mmap.mmap(-1, 2 * PAGE), np.uint8)
    refused: dict[str, Callable[[], object]] = {
        "newBufferWithLength: length is 0": lambda: device.new_buffer(0),
        "newBufferWithLength: .* exceeds maxBufferLength": lambda: device.new_buffer(4 * PAGE + 1),
        "newBufferWithLength: .* options 16 is neither": lambda: device.new_buffer(16, storage="managed"),
        "contents: .* MTLStorageModePrivate": lambda: device.new_buffer(64, storage="private").contents,
        "NoCopy: pointer is .* not a multiple": lambda: device.new_buffer_no_copy(memory, 64, PAGE),
        "NoCopy: length .* not a multiple": lambda: device.new_buffer_no_copy(memory, length=PAGE + 4),
    }
    for message, call in refused.items():
        with refuses(message):
            call()


def test_blit_ranges(device: Any, library: KernelLibrary, refuses: Any) -> None:
    a, b = device.new_buffer(16), device.new_buffer(8)
    command_buffer = library.queue.command_buffer()
    encoder = command_buffer.blit_encoder()
    for message, arguments in {
        "destination bytes 4 to 12 of a buffer of 8": (a, 0, b, 4, 8),
        "source bytes 12 to 20 of a buffer of 16": (a, 12, b, 0, 8),
        "source and destination overlap": (a, 0, a, 4, 8),
        "size is 0": (a, 0, b, 0, 0),
        "2 is not a multiple of 4 bytes": (a, 2, b, 0, 4),
        "6 is not a multiple of 4 bytes": (a, 0, b, 0, 6),
    }.items():
        with refuses(f"copyFromBuffer: {message}"):
            encoder.copy(*arguments)
    with refuses("fillBuffer: range: bytes 8 to 24 of a buffer of 16"):
        encoder.fill(a, 8, 16, 0)
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
