"""Run single Metal kernels on NumPy arrays, through the Objective-C API."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

# A buffer argument: an array is bound as a Shared buffer and has the buffer's contents afterwards; bytes and
# NumPy's scalars are passed with setBytes; None leaves the index unbound.
Argument = np.ndarray[Any, Any] | np.generic | bytes | None
Size = int | tuple[int, ...]


def testing_module() -> Any:
    """Return the module through which tests call Metal; raises ImportError if it was not built."""
    return importlib.import_module("_metal_testing")


def u32(value: int) -> bytes:
    """Return a number as setBytes passes it."""
    return np.uint32(value).tobytes()


def three(size: Size) -> tuple[int, int, int]:
    """Return a size in three dimensions."""
    sizes = (size,) if isinstance(size, int) else size
    return (*sizes, 1, 1, 1)[:3]  # type: ignore[return-value]


@contextmanager
def encoded(queue: Any, kind: str = "compute", *options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a command buffer and an encoder of it; afterwards run the command buffer and wait for it."""
    command_buffer = queue.command_buffer()
    encoder = getattr(command_buffer, f"{kind}_encoder")(*options)
    try:
        yield command_buffer, encoder
    finally:
        encoder.end()
    command_buffer.commit()
    command_buffer.wait()


class KernelLibrary:
    """The kernels of one Metal source.

    Parameters
    ----------
    source
        Text of the source, with local includes in place. Except on macOS, it must be the text of a
        file that the test module was built with. None selects the compiled library.
    compiled
        Path of the compiled library.
    fast_math, language
        Options of the compiler: Metal's defaults are fast maths, and the newest language.
    """

    def __init__(
        self,
        source: str | None,
        *,
        compiled: str | None = None,
        fast_math: bool = True,
        language: tuple[int, int] | None = None,
    ) -> None:
        self.device: Any = testing_module().Device()
        if source is None:
            self.library: Any = self.device.load_library(compiled)
        else:
            self.library = self.device.new_library(source, fast_math=fast_math, language=language)
        self.queue: Any = self.device.new_queue()

    def close(self) -> None:
        """Release all Metal objects, even if this object is still referenced."""
        for holder in (self.library, self.queue, self.device):
            holder.release()

    def pipeline(self, kernel: str) -> Any:
        """Return a compute pipeline."""
        return self.device.new_pipeline(self.library.new_function(kernel))

    def encode(
        self,
        encoder: Any,
        kernel: str,
        bindings: Sequence[Any],
        *,
        threads: Size,
        groups: Size = 1,
        threadgroup: Sequence[int] = (),
    ) -> None:
        """Encode one dispatch; `dispatch` describes the other arguments.

        A binding is a buffer, a buffer and an offset in it, bytes for setBytes, or None.
        """
        encoder.set_pipeline(self.pipeline(kernel))
        for index, binding in enumerate(bindings):
            if isinstance(binding, bytes):
                encoder.set_bytes(index, binding)
            elif binding is not None:
                encoder.set_buffer(index, *(binding if isinstance(binding, tuple) else (binding,)))
        for index, length in enumerate(threadgroup):
            encoder.set_threadgroup_memory(index, length)
        encoder.dispatch_threadgroups(three(groups), three(threads))

    def dispatch(
        self,
        kernel: str,
        buffers: Sequence[Argument],
        *,
        threads: Size,
        groups: Size,
        threadgroup: Sequence[int] = (),
    ) -> None:
        """Run one dispatch and wait for it.

        Parameters
        ----------
        kernel
            Name of the function.
        buffers
            Arguments by index.
        threads
            Threads of a threadgroup.
        groups
            Threadgroups.
        threadgroup
            Bytes of threadgroup memory by index.

        Raises
        ------
        RuntimeError
            Metal or the emulator reports an error.
        """
        bindings: list[Any] = [
            argument.tobytes() if isinstance(argument, np.generic) else argument for argument in buffers
        ]
        arrays = [(i, argument) for i, argument in enumerate(buffers) if isinstance(argument, np.ndarray)]
        for index, array in arrays:
            bindings[index] = self.device.new_buffer_with_bytes(np.ascontiguousarray(array).tobytes())
        with encoded(self.queue) as (command_buffer, encoder):
            self.encode(encoder, kernel, bindings, threads=threads, groups=groups, threadgroup=threadgroup)
        if command_buffer.status != "completed":
            raise RuntimeError(command_buffer.error)
        for index, array in arrays:
            array[...] = bindings[index].contents.view(array.dtype).reshape(array.shape)
