"""Tile configurations of AMX as the compiler made them, read from the extension: no processor needed."""

import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from metal_prefill import _core

TILE_CONFIG_OPCODE = b"\xc4\xe2\x78\x49"  # of ldtilecfg from memory and of tilerelease
TILE_RELEASE = 0xC0
AT_INSTRUCTION_POINTER = 0x05  # operand: 32 bits that are added to the address of the next instruction
PROGRAM_HEADER_LOAD, EXECUTABLE, WRITABLE = 1, 1, 2


class Segment(NamedTuple):
    """Part of the extension as loaded into memory."""

    address: int
    flags: int
    data: bytes


def segments(elf: bytes) -> Iterator[Segment]:
    """Yield the mapped segments of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    for at in range(table, table + size * count, size):
        kind, flags, offset, address, _, length = struct.unpack_from("<IIQQQQ", elf, at)
        if kind == PROGRAM_HEADER_LOAD:
            yield Segment(address, flags, elf[offset : offset + length])


def read_only(loaded: list[Segment], address: int, size: int) -> bytes:
    """Return constant bytes of the program; fails where they can be written."""
    for segment in loaded:
        at = address - segment.address
        if 0 <= at <= len(segment.data) - size:
            assert not segment.flags & WRITABLE, "a tile configuration is in memory that can be written"
            return segment.data[at : at + size]
    raise AssertionError("a tile configuration is outside of the loaded segments")


def tile_configs(elf: bytes) -> Iterator[bytes]:
    """Yield the 64 bytes that each `ldtilecfg` reads."""
    loaded = list(segments(elf))
    for segment in loaded:
        if not segment.flags & EXECUTABLE:
            continue
        at = segment.data.find(TILE_CONFIG_OPCODE)
        while at >= 0:
            at += len(TILE_CONFIG_OPCODE)
            operand = segment.data[at]
            if operand != TILE_RELEASE:
                assert operand == AT_INSTRUCTION_POINTER, "ldtilecfg does not read a constant"
                (offset,) = struct.unpack_from("<i", segment.data, at + 1)
                yield read_only(loaded, segment.address + at + 5 + offset, 64)
            at = segment.data.find(TILE_CONFIG_OPCODE, at)


def test_every_tile_configuration_is_a_whole_constant() -> None:
    """The processor faults on a configuration if the compiler omits a part of it."""
    elf = Path(_core.__file__).read_bytes()
    if elf[:4] != b"\x7fELF" or platform.machine() != "x86_64" or TILE_CONFIG_OPCODE not in elf:
        pytest.skip("the extension has no kernels for AMX")
    depths = set()
    for config in tile_configs(elf):
        palette, start_row, reserved, row_bytes, rows = struct.unpack("<BB14s32s16s", config)
        assert (palette, start_row, reserved) == (1, 0, bytes(14))
        widths = struct.unpack("<16H", row_bytes)
        depth = widths[4]  # columns of a step: a row of A, and 4 of them in each row of B
        assert depth % 4 == 0
        assert widths == (64,) * 4 + (depth,) * 2 + (64,) * 2 + (0,) * 8
        assert tuple(rows) == (16,) * 6 + (depth // 4,) * 2 + (0,) * 8
        depths.add(depth)
    # Half a block with separate scales, a block, and the operands of the peak measurement.
    assert depths == {16, 32, 64}
