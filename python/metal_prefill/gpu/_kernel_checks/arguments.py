"""Arguments of kernels, decoded by the layout of their structs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from metal_prefill import _core

_CODES = {"u32_t": "I", "u64_t": "Q", "float": "f"}


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
    """Return the fields of an argument struct by name.

    Raises
    ------
    ValueError
        If the size of `data` differs from that of the struct.
    """
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
