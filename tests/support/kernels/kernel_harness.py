"""Argument structs, random weights, guarded outputs and a dispatch function for tests of kernels.

The oracle is the package's float64 computation of single dispatches, with which `doctor` checks a GPU.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from metal_prefill import _core
from metal_prefill.gpu._kernel_checks import results
from metal_prefill.gpu._kernel_checks.captured import Captured
from metal_prefill.synth._blocks import random_tensor
from support.kernels.float64 import ACTIVATIONS
from support.places import ROOT
from support.reference import dequantized

sys.path.insert(0, str(ROOT / "cmake"))

import embed_shaders

Array = NDArray[Any]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

SHADERS = ROOT / "shaders"
SENTINELS = 64
SENTINEL = 0x5A


def flat_source(path: Path) -> str:
    """Return the text for newLibraryWithSource: a shader with its local includes in place."""
    return embed_shaders.flatten(path, [SHADERS], ROOT)


def language_of(source: Path) -> tuple[int, int]:
    """Return the version of Metal that the build sets for a source: (major, minor)."""
    file = "CMakeLists.txt" if "_tensor" in source.stem else "cpp/metal/CMakeLists.txt"
    major, minor = re.findall(r"^set\(\w+_language_\w+ (\d+)\)", (ROOT / file).read_text(), re.MULTILINE)
    return int(major), int(minor)


class Run(Protocol):
    """Dispatches a kernel over arrays in the order of its bindings, and updates those that it writes."""

    def __call__(
        self,
        kernel: str,
        *buffers: Array,
        groups: Sequence[int],
        threads: Sequence[int],
        threadgroup_bytes: int = 0,
    ) -> None: ...


def _dtype(name: str) -> np.dtype[Any]:
    size, fields = _core.args_structs[name]
    scalars: dict[str, Any] = {"u32_t": np.uint32, "u64_t": np.uint64, "float": np.float32}
    formats = [scalars.get(kind) or _dtype(kind) for _, kind, _, _ in fields]
    shaped = [(f, (count,)) if count > 1 else f for f, (_, _, _, count) in zip(formats, fields, strict=True)]
    names, offsets = [field for field, _, _, _ in fields], [offset for _, _, offset, _ in fields]
    described: Any = {"names": names, "formats": shaped, "offsets": offsets, "itemsize": size}
    return np.dtype(described, metadata={"struct": name})


STRUCTS = {name: _dtype(name) for name in _core.args_structs}
CONSTANTS = _core.shader_constants
CANDIDATE = STRUCTS["Candidate"]


def make_args(struct: str, **fields: Any) -> Array:
    """Make an argument struct of shaders/args_fields.h. Every field must be given."""
    dtype = STRUCTS[struct]
    assert dtype.names is not None
    assert set(fields) == set(dtype.names), f"{struct} has the fields {dtype.names}"
    args = np.zeros(1, dtype)
    for name, value in fields.items():
        args[name] = value
    return args


def close(actual: Array, expected: Doubles, bound: float = 1e-4) -> None:
    """Require a maximum error of `bound` times the largest magnitude expected."""
    worst = np.abs(_errors(actual, expected)).max()
    magnitude = np.abs(expected).max()
    assert worst <= bound * magnitude, f"error {worst} at a magnitude of {magnitude}"


def near(actual: Array, expected: Doubles) -> None:
    """Require a normalized mean square error of at most 5e-6, for operands in half precision."""
    error, size = (_errors(actual, expected) ** 2).sum(), (expected**2).sum()
    assert error <= 5e-6 * size, f"squared error {error} of {size}"


def _errors(actual: Array, expected: Doubles) -> Doubles:
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all(), "an output was not written, or is not finite"
    return actual.astype(np.float64) - expected


class Output:
    """An output array full of NaN, followed by sentinels."""

    def __init__(self, shape: Sequence[int], dtype: Any = np.float32, initial: Array | None = None) -> None:
        self._dtype = np.dtype({"f32": np.float32, "f16": np.float16}.get(dtype, dtype))
        self._bytes = int(np.prod(shape)) * self._dtype.itemsize
        self.buffer = np.full(self._bytes + SENTINELS, SENTINEL, np.uint8)
        self.array = self.buffer[: self._bytes].view(self._dtype).reshape(shape)
        self.array.view(np.uint8)[...] = 0xFF
        if initial is not None:
            self.array[...] = initial

    def check(self) -> Array:
        """Return the array, and check the sentinels after its end."""
        assert (self.buffer[self._bytes :] == SENTINEL).all(), "written beyond the end"
        return self.array


class Recorded:
    """A dispatch over arrays, in the form of an engine's trace."""

    def __init__(self, kernel: str, buffers: Sequence[Array], args: Array, groups: Sequence[int]) -> None:
        self.kernel, self.args, self.grid = kernel, args.tobytes(), (*groups, 1, 1)[:3]
        metadata: Any = args.dtype.metadata
        self.args_struct = metadata["struct"]
        self._after: list[Array] = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
        self._before: list[Array] = [contents.copy() for contents in self._after]

    def before(self, binding: int) -> Array:
        return self._before[binding]

    def after(self, binding: int) -> Array:
        return self._after[binding]


def check(
    run: Run,
    kernel: str,
    *buffers: Any,  # arrays and outputs, and the arguments
    within: float = 1e-4,
    compare: Callable[[Array, Doubles], None] | None = None,
    **launch: Any,
) -> None:
    """Dispatch a kernel, and compare each value of its outputs with float64 results.

    By default, results in half precision must be `near`, and others `close` within a bound.
    """
    *given, args = buffers
    outputs = [buffer for buffer in given if isinstance(buffer, Output)]
    arrays = [buffer.buffer if isinstance(buffer, Output) else buffer for buffer in given]
    dispatch: Any = Recorded(kernel, arrays, args, launch["groups"])
    run(kernel, *arrays, args, **launch)
    compared = 0
    with np.errstate(over="ignore"):
        expectations = list(results(Captured(dispatch, sampled=False)))
    for got, expected in expectations:
        if compare is not None:
            compare(got, expected)
        elif got.dtype == np.float16:
            near(got, expected)
        else:
            close(got, expected, within)
        compared += got.size
    assert compared >= sum(output.check().size for output in outputs), "some results were not compared"


class Weights:
    """Stacked matrices of one type, in the file's format and as float64."""

    def __init__(self, rng: np.random.Generator, kind: str, rows: Sequence[int], cols: int) -> None:
        self.kind, self.cols, self.rows = kind, cols, list(rows)
        parts, values = [], []
        for n in rows:
            raw = random_tensor(rng, kind, n * cols, 1 / np.sqrt(cols))
            parts.append(raw)
            quant_type = gguf.GGMLQuantizationType[kind]
            flat = raw.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8)).reshape(n, -1)
            values.append(dequantized(flat, quant_type).astype(np.float64))
        self.row_bytes = parts[0].size // rows[0]
        # Each matrix starts at a multiple of 32 bytes, as in a file, not at the end of the previous one.
        self.offsets, size = [], 0
        for raw in parts:
            self.offsets.append(size + 32)
            size = (self.offsets[-1] + raw.size + 31) // 32 * 32
        self.bytes = np.full(size, 0xFF, np.uint8)
        for offset, raw in zip(self.offsets, parts, strict=True):
            self.bytes[offset : offset + raw.size] = raw
        self.values = np.concatenate(values)

    def stacked(self) -> tuple[list[int], list[int], int, int]:
        """Return the contents of a StackedWeights struct."""
        missing = [0] * (CONSTANTS["STACKED_MATRICES"] - len(self.rows))
        return self.offsets + missing, self.rows + missing, self.row_bytes, 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def columns(kind: str, wanted: int) -> int:
    """Return the smallest length of a row of the type that is at least `wanted`."""
    unit: int = max(8, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0])
    return ceil_div(wanted, unit) * unit


ACTIVATION_CODES = {name: CONSTANTS[f"ACTIVATION_{name.upper()}"] for name in ACTIVATIONS}
SILU = ACTIVATION_CODES["silu"]
