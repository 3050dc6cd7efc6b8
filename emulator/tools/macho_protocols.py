"""Read the Objective-C protocols of a Mach-O library: their selectors and type encodings.

Compilers write a full description of every protocol that a binary refers to, so a binding of Apple's
frameworks contains their interface in a form that needs no header. Only what such a 64-bit little-endian
library contains is supported: classic rebase information (pointers stored unchanged) and both forms of method
lists.
"""

import struct
from dataclasses import dataclass

FAT_MAGIC = 0xCAFEBABE
MACHO_MAGIC_64 = 0xFEEDFACF
CPU_ARM64 = 0x0100000C
LC_SEGMENT_64 = 0x19
LC_DYLD_CHAINED_FIXUPS = 0x80000034
RELATIVE_METHODS = (
    0x80000000  # in the entry size of a method list: three 32-bit offsets instead of three pointers
)


class FormatError(ValueError):
    """The file is not a supported library."""


@dataclass(frozen=True)
class Section:
    """A section's place in memory and in the file, in bytes."""

    address: int
    size: int
    offset: int


class Library:
    """The arm64 part of a Mach-O file.

    Parameters
    ----------
    data
        The whole file, universal or not.

    Raises
    ------
    FormatError
        There is no arm64 part or it uses chained fixups.
    """

    def __init__(self, data: bytes) -> None:
        self.data = arm64_slice(data)
        self.sections: dict[str, Section] = {}
        self._read_load_commands()

    def _read_load_commands(self) -> None:
        magic, _, _, _, commands, *_ = struct.unpack_from("<8I", self.data)
        if magic != MACHO_MAGIC_64:
            raise FormatError("not a 64-bit Mach-O file")
        position = 32
        for _ in range(commands):
            command, size = struct.unpack_from("<2I", self.data, position)
            if command == LC_DYLD_CHAINED_FIXUPS:
                raise FormatError("chained fixups are not supported")
            if command == LC_SEGMENT_64:
                (count,) = struct.unpack_from("<I", self.data, position + 64)
                for index in range(count):
                    self._read_section(position + 72 + 80 * index)
            position += size

    def _read_section(self, position: int) -> None:
        name, _, address, size, offset = struct.unpack_from("<16s16sQQI", self.data, position)
        self.sections[name.rstrip(b"\0").decode()] = Section(address, size, offset)

    def offset(self, address: int) -> int:
        """Return the offset in the file of an address."""
        for section in self.sections.values():
            if section.address <= address < section.address + section.size:
                return section.offset + address - section.address
        raise FormatError(f"address {address:#x} is in no section")

    def pointer(self, address: int) -> int:
        """Return the 64-bit value at an address."""
        value: int = struct.unpack_from("<Q", self.data, self.offset(address))[0]
        return value

    def string(self, address: int) -> str:
        """Return the null-terminated string at an address."""
        start = self.offset(address)
        return self.data[start : self.data.index(b"\0", start)].decode()

    def methods(self, address: int) -> dict[str, str]:
        """Return selector and type encoding of each entry of a method list; address 0 is an empty list."""
        if address == 0:
            return {}
        entry_size, count = struct.unpack_from("<2I", self.data, self.offset(address))
        found: dict[str, str] = {}
        for index in range(count):
            if entry_size & RELATIVE_METHODS:
                entry = address + 8 + 12 * index
                name, types, _ = struct.unpack_from("<3i", self.data, self.offset(entry))
                selector = self.string(self.pointer(entry + name))
                found[selector] = self.string(entry + 4 + types)
            else:
                entry = address + 8 + 24 * index
                found[self.string(self.pointer(entry))] = self.string(self.pointer(entry + 8))
        return found

    def protocols(self) -> dict[str, dict[str, str]]:
        """Return the methods of each protocol: ``-selector`` or ``+selector`` to type encoding."""
        section = self.sections.get("__objc_protolist")
        if section is None:
            raise FormatError("there are no Objective-C protocols")
        result: dict[str, dict[str, str]] = {}
        for index in range(section.size // 8):
            protocol = self.pointer(section.address + 8 * index)
            # isa, name, protocols, then the four method lists
            methods: dict[str, str] = {}
            for field, kind in ((3, "-"), (4, "+"), (5, "-"), (6, "+")):
                entries = self.methods(self.pointer(protocol + 8 * field))
                methods |= {kind + selector: types for selector, types in entries.items()}
            result[self.string(self.pointer(protocol + 8))] = methods
        return result


def arm64_slice(data: bytes) -> bytes:
    """Return the arm64 part of a universal file, or the file itself."""
    magic, count = struct.unpack_from(">2I", data)
    if magic != FAT_MAGIC:
        return data
    for index in range(count):
        cpu, _, offset, size, _ = struct.unpack_from(">5I", data, 8 + 20 * index)
        if cpu == CPU_ARM64:
            return data[offset : offset + size]
    raise FormatError("the universal file has no arm64 part")
