"""Dispatches of a concurrent encoder with and without a need for a barrier between them."""

import time
from typing import Any

import numpy as np
import pytest
from metal_kernels import KernelLibrary, encoded, u32


class Encoder:
    """A concurrent encoder over one buffer of 64 unsigned integers and a second one."""

    def __init__(self, library: KernelLibrary, concurrent: bool = True) -> None:
        self.library = library
        self.first = library.device.new_buffer(256, label="first")
        self.second = library.device.new_buffer(256, label="second")
        self.command_buffer = library.queue.command_buffer()
        self.encoder = self.command_buffer.compute_encoder(concurrent)

    def store(self, position: int, offset: int = 0) -> None:
        """Write 8 elements of the first buffer, bound at a byte offset."""
        bindings = [(self.first, offset), u32(position), u32(7)]
        self.library.encode(self.encoder, "store", bindings, threads=8)

    def load(self, position: int, offset: int = 0, target: int = 0) -> None:
        """Read 8 elements of the first buffer into the second, each bound at a byte offset."""
        bindings = [(self.first, offset), (self.second, target), u32(position)]
        self.library.encode(self.encoder, "load", bindings, threads=8)

    def finish(self) -> str:
        """Run it; returns the error."""
        self.encoder.end()
        self.command_buffer.commit()
        self.command_buffer.wait()
        return str(self.command_buffer.error)


def test_read_after_write_without_a_barrier(library: KernelLibrary, emulator: Any) -> None:
    encoder = Encoder(library)
    encoder.store(0)
    expected = (
        r"kernel 'load', dispatch 1, buffer\(0\) 'x' = \"first\" reads bytes 0 to 256 of a buffer that "
        r"kernel 'store', dispatch 0, buffer\(0\) 'y' = \"first\" writes, with no memory barrier"
    )
    with pytest.raises(emulator.ValidationError, match=expected):
        encoder.load(0)
    assert encoder.finish() == ""


@pytest.mark.usefixtures("checked")
def test_reads_do_not_need_a_barrier(library: KernelLibrary) -> None:
    encoder = Encoder(library)
    encoder.load(0, target=0)
    encoder.load(0, target=128)
    assert encoder.finish() == ""


@pytest.mark.usefixtures("checked")
def test_a_barrier_orders_dispatches(library: KernelLibrary) -> None:
    encoder = Encoder(library)
    encoder.store(0)
    encoder.encoder.barrier()
    encoder.load(0)
    assert encoder.finish() == ""
    assert encoder.second.contents.view(np.uint32)[:8].tolist() == [7] * 8


@pytest.mark.usefixtures("checked")
def test_a_serial_encoder_orders_dispatches(library: KernelLibrary) -> None:
    encoder = Encoder(library, concurrent=False)
    encoder.store(0)
    encoder.load(0)
    assert encoder.finish() == ""


def test_parts_of_a_buffer_bound_at_different_offsets_are_independent(library: KernelLibrary) -> None:
    encoder = Encoder(library)
    encoder.store(0, offset=0)
    encoder.store(0, offset=128)
    encoder.load(0, offset=64)
    assert encoder.finish() == ""


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_finds_overlapping_ranges(library: KernelLibrary) -> None:
    encoder = Encoder(library)
    encoder.store(4, offset=0)  # bytes 16 to 48
    encoder.load(0, offset=32)  # bytes 32 to 64
    error = encoder.finish()
    assert "kernel 'load', dispatch 1, buffer(0) 'x' = \"first\" reads bytes 32 to 48" in error
    assert "kernel 'store', dispatch 0, buffer(0) 'y' = \"first\" writes" in error


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_accepts_interleaved_ranges(library: KernelLibrary) -> None:
    encoder = Encoder(library)
    encoder.store(0)
    encoder.load(8)
    encoder.store(16)
    assert encoder.finish() == ""


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_finds_two_writes(library: KernelLibrary) -> None:
    encoder = Encoder(library)
    encoder.store(0)
    encoder.store(7)
    assert "writes bytes 28 to 32" in encoder.finish()


@pytest.mark.usefixtures("checked_mode")
def test_a_new_encoder_is_ordered_after_the_previous_one(library: KernelLibrary) -> None:
    encoder = Encoder(library)
    encoder.store(0)
    encoder.encoder.end()
    encoder.encoder = encoder.command_buffer.compute_encoder(True)
    encoder.load(0)
    assert encoder.finish() == ""


class Untracked:
    """Command buffers that write and read one untracked buffer."""

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self.buffer = library.device.new_buffer(64, label="untracked", untracked=True)
        self.target = library.device.new_buffer(64)

    def encode(
        self, command_buffer: Any, kernel: str, offset: int = 0, *, waits: Any = None, updates: Any = None
    ) -> None:
        """Encode one dispatch on a separate encoder."""
        encoder = command_buffer.compute_encoder()
        if waits is not None:
            encoder.wait_for_fence(waits)
        other = self.target if kernel == "load" else u32(0)
        try:
            self.library.encode(encoder, kernel, [(self.buffer, offset), other, u32(0)], threads=4)
            if updates is not None:
                encoder.update_fence(updates)
        finally:
            encoder.end()

    def commands(self, kernel: str) -> Any:
        """Return a command buffer with one dispatch."""
        command_buffer = self.library.queue.command_buffer()
        self.encode(command_buffer, kernel)
        return command_buffer


def test_untracked_buffers_require_a_fence_between_encoders(library: KernelLibrary, emulator: Any) -> None:
    untracked = Untracked(library)
    command_buffer = untracked.commands("store")
    with pytest.raises(emulator.ValidationError, match=r"dispatch 1, buffer\(0\) 'x'.*with no fence between"):
        untracked.encode(command_buffer, "load")
    untracked.encode(command_buffer, "load", offset=32)
    blit = command_buffer.blit_encoder()
    with pytest.raises(emulator.ValidationError, match='copyFromBuffer, source = "untracked" reads'):
        blit.copy(untracked.buffer, 0, untracked.target, 0, 16)
    blit.end()


def test_untracked_buffers_require_a_wait_between_command_buffers(
    library: KernelLibrary, emulator: Any
) -> None:
    untracked = Untracked(library)
    first, second = untracked.commands("store"), untracked.commands("load")
    first.commit()
    with pytest.raises(emulator.ValidationError, match=r"commit: kernel 'load'.*with no wait between"):
        second.commit()
    first.wait()
    second.commit()
    third = untracked.commands("load")
    third.commit()  # two that read
    third.wait()  # and with it the second, of the same queue
    fourth = untracked.commands("store")
    fourth.commit()
    fourth.wait()


@pytest.mark.parametrize("where", ["one command buffer", "two"])
def test_a_fence_orders_encoders_that_use_untracked_buffers(
    library: KernelLibrary, emulator: Any, where: str
) -> None:
    untracked = Untracked(library)
    fence, other = library.device.new_fence(), library.device.new_fence()
    first = library.queue.command_buffer()
    untracked.encode(first, "store", updates=fence)
    second = first
    if where == "two":
        first.commit()
        second = library.queue.command_buffer()
    untracked.encode(second, "load", waits=fence, updates=other)
    second.commit()
    third = library.queue.command_buffer()
    untracked.encode(third, "store", waits=other)  # after the first, since the second is
    third.commit()
    third.wait()
    for holder in (fence, other):
        holder.release()


def test_a_fence_that_another_encoder_updated_orders_nothing(library: KernelLibrary, emulator: Any) -> None:
    untracked = Untracked(library)
    fence = library.device.new_fence()
    first, second = library.queue.command_buffer(), library.queue.command_buffer()
    untracked.encode(first, "load", offset=32, updates=fence)
    untracked.encode(first, "store")
    untracked.encode(second, "load", waits=fence)
    first.commit()
    with pytest.raises(emulator.ValidationError, match="no fence between their encoders"):
        second.commit()
    first.wait()
    fence.release()


def test_a_fence_orders_nothing_on_another_queue(library: KernelLibrary, emulator: Any) -> None:
    untracked = Untracked(library)
    fence, queue = library.device.new_fence(), library.device.new_queue()
    first, second = library.queue.command_buffer(), queue.command_buffer()
    untracked.encode(first, "store", updates=fence)
    untracked.encode(second, "load", waits=fence)
    first.commit()
    with pytest.raises(emulator.ValidationError, match="commit: kernel 'load'"):
        second.commit()
    first.wait()
    fence.release()


def test_completion_is_visible_without_a_wait(library: KernelLibrary) -> None:
    untracked = Untracked(library)
    first, second = untracked.commands("store"), untracked.commands("load")
    first.commit()
    while first.status != "completed":
        time.sleep(0.001)
    second.commit()
    second.wait()


def test_tracked_buffers_are_ordered_by_metal(library: KernelLibrary) -> None:
    untracked = Untracked(library)
    untracked.buffer = library.device.new_buffer(64)
    first, second = untracked.commands("store"), untracked.commands("load")
    first.commit()
    second.commit()
    second.wait()
    assert second.status == "completed"


class Addition:
    """Sums of floats; the second addends and the sums are in one buffer.

    Parameters
    ----------
    addends, sums
        Offsets of bindings in the buffer, in bytes.
    private
        Use a large private buffer; `copied` receives its first part.
    """

    def __init__(self, library: KernelLibrary, addends: int, sums: int, private: bool = False) -> None:
        ones = library.device.new_buffer(256)
        ones.contents.view(np.float32)[:] = 1
        self.both = self.copied = library.device.new_buffer(512, label="both")
        self.both.contents.view(np.float32)[:] = np.arange(128)
        self.command_buffer = library.queue.command_buffer()
        if private:
            self.both = library.device.new_buffer(1 << 20, storage="private")
            self.copy(self.copied, self.both)
        self.library, self.bindings = library, [ones, (self.both, addends), (self.both, sums)]

    def copy(self, source: Any, target: Any) -> None:
        """Copy the part of the buffer with numbers."""
        encoder = self.command_buffer.blit_encoder()
        encoder.copy(source, 0, target, 0, 512)
        encoder.end()

    def run(self, count: int) -> str:
        """Compute this many sums; returns the error."""
        encoder = self.command_buffer.compute_encoder(True)
        self.library.encode(encoder, "add", self.bindings, threads=count)
        encoder.end()
        if self.copied is not self.both:
            self.copy(self.both, self.copied)
        self.command_buffer.commit()
        self.command_buffer.wait()
        return str(self.command_buffer.error)


@pytest.mark.parametrize(("addends", "sums"), [(0, 128), (128, 0)], ids=["sums last", "sums first"])
@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_finds_bindings_that_overlap(library: KernelLibrary, addends: int, sums: int) -> None:
    error = Addition(library, addends, sums).run(33)
    assert "kernel 'add', dispatch 0, buffer(2) 'sum' = \"both\" writes bytes 128 to 132" in error
    assert "buffer(1) 'b' of the same dispatch reads" in error


@pytest.mark.usefixtures("checked_mode")
def test_checked_mode_finds_a_byte_that_two_bindings_write(library: KernelLibrary) -> None:
    first = library.device.new_buffer(256, label="first")
    with encoded(library.queue, "compute", True) as (command_buffer, encoder):
        library.encode(encoder, "store_twice", [first, (first, 64)], threads=17)
    assert "buffer(0) 'y' = \"first\" writes bytes 64 to 68" in command_buffer.error
    assert "buffer(1) 'z' of the same dispatch writes" in command_buffer.error


@pytest.mark.parametrize(("addends", "sums"), [(0, 128), (128, 0)], ids=["sums last", "sums first"])
@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
@pytest.mark.usefixtures("checked")
def test_bindings_of_one_buffer_may_use_its_parts(
    library: KernelLibrary, addends: int, sums: int, private: bool
) -> None:
    addition = Addition(library, addends, sums, private)
    assert addition.run(32) == ""
    expected = np.arange(128, dtype=np.float32)
    expected[sums // 4 : sums // 4 + 32] = expected[addends // 4 : addends // 4 + 32] + 1
    np.testing.assert_array_equal(addition.copied.contents.view(np.float32), expected)
