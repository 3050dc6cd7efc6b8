"""Read the Objective-C protocols of a Mach-O library: their selectors and type encodings.

Compilers write a full description of every protocol that a binary refers to, so a binding of Apple's
frameworks contains their interface in a form that needs no header. Only what such a library contains is
supported: classic rebase information (pointers stored unchanged) and both forms of method lists.
"""

import struct
from typing import Any

RELATIVE_METHODS = (
    0x80000000  # in the entry size of a method list: three 32-bit offsets instead of three pointers
)


class FormatError(ValueError):
    """The file is not a supported library."""


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
        import lief  # only reading a wheel needs it

        file: Any = lief.MachO.parse(data)
        self.binary = file and file.take(lief.MachO.Header.CPU_TYPE.ARM64)
        if self.binary is None:
            raise FormatError("not a Mach-O file with an arm64 part")
        if self.binary.has_dyld_chained_fixups:
            raise FormatError("chained fixups are not supported")

    def read(self, address: int, layout: str) -> tuple[int, ...]:
        """Return the integers at an address."""
        size = struct.calcsize(layout)
        return struct.unpack(layout, self.binary.get_content_from_virtual_address(address, size))

    def pointers(self, address: int, count: int) -> tuple[int, ...]:
        """Return the 64-bit values at an address."""
        return self.read(address, f"<{count}Q")

    def string(self, address: int) -> str:
        """Return the null-terminated string at an address."""
        section = self.binary.section_from_virtual_address(address)
        text = bytes(section.content[address - section.virtual_address :])
        return text.partition(b"\0")[0].decode()

    def methods(self, address: int) -> dict[str, str]:
        """Return selector and type encoding of each entry of a method list; address 0 is an empty list."""
        if address == 0:
            return {}
        entry_size, count = self.read(address, "<2I")
        found: dict[str, str] = {}
        for index in range(count):
            if entry_size & RELATIVE_METHODS:
                entry = address + 8 + 12 * index
                name, types, _ = self.read(entry, "<3i")
                (selector,) = self.pointers(entry + name, 1)
                found[self.string(selector)] = self.string(entry + 4 + types)
            else:
                selector, encoding = self.pointers(address + 8 + 24 * index, 2)
                found[self.string(selector)] = self.string(encoding)
        return found

    def protocols(self) -> dict[str, dict[str, str]]:
        """Return the methods of each protocol: ``-selector`` or ``+selector`` to type encoding."""
        section = self.binary.get_section("__objc_protolist")
        if section is None:
            raise FormatError("there are no Objective-C protocols")
        result: dict[str, dict[str, str]] = {}
        for protocol in self.pointers(section.virtual_address, section.size // 8):
            # isa, name, protocols, then lists of required and optional methods of instances and class
            _, name, _, *lists = self.pointers(protocol, 7)
            methods = zip("-+-+", map(self.methods, lists), strict=True)
            result[self.string(name)] = {
                kind + selector: types for kind, entries in methods for selector, types in entries.items()
            }
        return result
