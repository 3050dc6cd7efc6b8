"""The CPU engine on emulated 64-bit Arm processors: `tests/arm` in qemu, called like `_cpu_testing`."""

import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metal_prefill import _core
from support.kernels.cpu_testing import cpu_testing
from support.missing import fail_or_skip
from support.places import ROOT

SERVER = ROOT / "build/arm/arm_server"
MISSING = (
    "the Arm kernels cannot be run: they need clang 19, Debian's cross libraries and qemu (apt-get install "
    "clang-19 lld-19 qemu-user libstdc++-12-dev-arm64-cross); `make test` then builds them"
)
# The oldest processor for each set, so that a kernel cannot use the instructions of another set.
PROCESSORS = {"neon_i8mm": "max", "neon_dotprod": "cortex-a76", "neon": "cortex-a72"}
# No sets on Arm, nor under sanitizers, which cannot observe another process.
SANITIZED = _core.has_emulator and bool(_core.emulator.sanitizer)
SETS = [] if platform.machine() in ("arm64", "aarch64") or SANITIZED else list(PROCESSORS)
Floats = NDArray[np.float32]
NO_SINKS: Floats = np.zeros(0, np.float32)


class ArmMachine:
    """A process on an emulated processor."""

    def __init__(
        self,
        processor: str,  # as qemu names it
        environment: dict[str, str] | None = None,  # variables in addition to this process's
    ) -> None:
        qemu = shutil.which("qemu-aarch64")
        if qemu is None or not SERVER.exists():
            fail_or_skip(MISSING, "METAL_PREFILL_REQUIRE_EMULATOR")
        self._process = subprocess.Popen(
            [qemu, "-cpu", processor, SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | (environment or {}),
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function, and update the arrays that it writes."""
        sent = self._process.stdin
        assert sent is not None
        sent.write(struct.pack("<I", 1 + len(arguments)) + b"".join(map(_encoded, (name, *arguments))))
        sent.flush()
        (count,) = struct.unpack("<I", self._receive(4))
        returned, *values = [self._value() for _ in range(count)]
        if isinstance(returned, str):
            raise ValueError(f"{name}: {returned}")
        results, written = values[: int(returned)], values[int(returned) :]
        for index, contents in zip(written[::2], written[1::2], strict=True):
            out = arguments[int(index)]
            out[...] = contents.view(out.dtype).reshape(out.shape)
        return results if len(results) > 1 else results[0] if results else None

    def _receive(self, n: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(n)
        if len(data) != n:
            raise RuntimeError(f"the emulated process ended with {self._process.wait()}")
        return data

    def _value(self) -> Any:
        tag = self._receive(1).decode()
        if tag == "s":
            (n,) = struct.unpack("<I", self._receive(4))
            return self._receive(n).decode()
        if tag == "a":
            size, rows, cols = struct.unpack("<3I", self._receive(12))
            return np.frombuffer(self._receive(size * rows * cols), np.uint8).reshape(rows, cols * size)
        return struct.unpack("<d", self._receive(8))[0]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _encoded(value: Any) -> bytes:
    if isinstance(value, str):
        return b"s" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, np.ndarray):
        rows, cols = value.shape if value.ndim == 2 else (len(value), 1)
        return b"a" + struct.pack("<3I", value.itemsize, rows, cols) + value.tobytes()
    return b"n" + struct.pack("<d", value)


@cache
def machine_of(isa: str) -> ArmMachine:
    """Return the processor that runs a set, shared by all tests."""
    return ArmMachine(PROCESSORS[isa])


class Kernels:
    """The functions of `_cpu_testing`; the set that their first argument names selects the processor."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(isa: str, *arguments: Any) -> Any:
            if isa in SETS:
                return machine_of(isa).call(name, isa, *arguments)
            return getattr(cpu_testing(), name)(isa, *arguments)

        return call

    def quantize(self, isa: str, x: Floats, first: int) -> tuple[NDArray[np.float64], ...]:
        """Return codes [tokens, cols], then scale, scaled_sum, start and start_half [tokens, blocks]."""
        codes, terms = np.zeros(x.shape, np.int8), np.zeros((len(x), x.shape[1] // 8), np.float32)
        self.__getattr__("quantize")(isa, x, first, codes, terms)
        of_blocks = terms.reshape(len(x), -1, 4).astype(np.float64)
        return codes.astype(np.float64), *np.moveaxis(of_blocks, 2, 0)

    def attention(
        self,
        *arguments: Any,
        sinks: Floats = NO_SINKS,
        exact: bool = False,
        both_ways: bool = False,
        key_multiple: int = 0,
        by_splits: bool = False,
    ) -> None:
        """Compute attention; options are off unless given."""
        options = (sinks, exact, both_ways, key_multiple, by_splits)
        self.__getattr__("attention")(*arguments, *options)
