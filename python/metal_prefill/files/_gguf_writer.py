"""The writer of the gguf package, which packs lists such as vocabularies faster."""

import struct
from typing import Any

import gguf

_FORMATS = {int: "i", float: "f"}


class GGUFWriter(gguf.GGUFWriter):  # type: ignore[misc]
    """Writes what the gguf package writes, which packs the items of a list one by one."""

    def _pack_val(self, val: Any, vtype: gguf.GGUFValueType, add_vtype: bool, **more: Any) -> bytes:
        if vtype is gguf.GGUFValueType.ARRAY and set(more.values()) <= {None} and (packed := _packed(val)):
            return (struct.pack("<I", vtype) if add_vtype else b"") + packed
        return bytes(super()._pack_val(val, vtype, add_vtype, **more))


def _packed(values: Any) -> bytes | None:
    """Return the type of the items of a list, their number and their bytes; None for other values."""
    kinds = set(map(type, values if isinstance(values, list) else ()))
    if isinstance(values, bytes):  # a character map of SentencePiece has hundreds of thousands
        return struct.pack("<IQ", gguf.GGUFValueType.UINT8, len(values)) + values if values else None
    if kinds == {str}:
        number = struct.Struct("<Q").pack
        texts = [text.encode("utf-8") for text in values]
        items = b"".join([part for text in texts for part in (number(len(text)), text)])
    elif kinds in ({int}, {float}):
        items = struct.pack(f"<{len(values)}{_FORMATS[type(values[0])]}", *values)
    else:
        return None
    return struct.pack("<IQ", gguf.GGUFValueType.get_type(values[0]), len(values)) + items
