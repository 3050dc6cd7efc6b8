"""Recorded dispatches of a GPU engine or a plan."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from metal_prefill import _core

_CODES = {"u32_t": "I", "u64_t": "Q", "float": "f"}


@dataclass(frozen=True)
class Dispatch:
    """A dispatch of a GPU kernel."""

    kernel: str  # name of the shader function
    layer: int  # index of the layer; -1 before and after the layers
    grid: tuple[int, int, int]  # number of threadgroups, (x, y, z)
    threads: int  # number of threads per threadgroup
    threadgroup_bytes: int  # size of the threadgroup memory that the host allocates
    after_barrier: bool  # whether the dispatch waits for the dispatches before it
    # Arguments of the kernel, by their names in ``shaders/args_fields.h``; fields of nested structs have
    # unqualified names. Offsets into the weights are omitted.
    args: dict[str, Any]
    buffers: tuple[str, ...] = ()  # labels of the buffers, by binding
    # Rows of a dispatch that reads or writes K and V: (position, rows) of each run of consecutive rows of a
    # sequence.
    runs: tuple[tuple[int, int], ...] = ()
    # Times in seconds on the GPU's clock; 0 for a dispatch that has not run.
    start: float = 0.0
    end: float = 0.0

    @property
    def groups(self) -> int:
        """Total number of threadgroups."""
        return self.grid[0] * self.grid[1] * self.grid[2]


def _fields(name: str, base: int) -> Iterator[tuple[str, struct.Struct, int, bool]]:
    for field, kind, offset, count in _core.args_structs[name][1]:
        if kind == "u64_t":  # offsets into the weights
            continue
        if kind in _CODES:
            yield field, struct.Struct(f"={count}{_CODES[kind]}"), base + offset, count > 1
        else:
            yield from _fields(kind, base + offset)


@cache
def _layout(name: str) -> tuple[tuple[str, struct.Struct, int, bool], ...]:
    return tuple(_fields(name, 0))


def decode_args(args_struct: str, data: bytes) -> dict[str, Any]:
    """Return the fields of an argument struct by name."""
    size = _core.args_structs[args_struct][0]
    if len(data) != size:
        raise ValueError(f"{args_struct} must have {size} bytes, got {len(data)}")
    args: dict[str, Any] = {}
    for name, layout, offset, is_array in _layout(args_struct):
        values = layout.unpack_from(data, offset)
        args[name] = list(values) if is_array else values[0]
    return args


def layout_of(struct: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a struct that kernels read or write in arrays."""
    return np.dtype([(name, _CODES[kind]) for name, kind, _, _ in _core.args_structs[struct][1]])


def from_core(dispatches: Sequence[_core.Dispatch]) -> list[Dispatch]:
    """Convert dispatches from the native module."""
    return [
        Dispatch(
            kernel=d.kernel,
            layer=d.layer,
            grid=d.grid,
            threads=d.threads,
            threadgroup_bytes=d.threadgroup_bytes,
            after_barrier=d.after_barrier,
            args=decode_args(d.args_struct, d.args),
            buffers=tuple(d.buffers),
            runs=tuple(d.runs),
            start=d.start,
            end=d.end,
        )
        for d in dispatches
    ]
