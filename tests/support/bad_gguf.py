"""Every known way in which a GGUF file can be invalid, with words that its error must contain.

The cases follow defects of other readers: counts and sizes that overflow when summed or multiplied, lengths
that are trusted, types that are not checked, tensors outside the file.
"""

from metal_prefill.files._gguf_file import TENSOR_TYPES
from support.gguf_bytes import (
    ARRAY,
    BOOL,
    SCALAR_FORMATS,
    STRING,
    U8,
    U32,
    U64,
    array,
    entry,
    gguf,
    scalar,
    tensor,
    text,
    u32,
)

HUGE = 2**64 - 1
ALIGNMENT = "general.alignment"
F32_DATA = bytes(128)  # name passed to tensor()
# Name of the case: content, and the pattern of the message.
BAD: dict[str, tuple[bytes, str]] = {
    "magic of another format": (b"GGML" + gguf()[4:], "not a GGUF file: begins with b'GGML'"),
    "magic in lower case": (gguf(magic=b"gguf"), "not a GGUF file"),
    "magic cut off": (b"GGU", "not a GGUF file: begins with b'GGU'"),
    "version 0": (gguf(version=0), "GGUF version 0"),
    "version 1": (gguf(version=1), "GGUF version 1 is not one of 2, 3"),
    "version 4": (gguf(version=4), "GGUF version 4"),
    "version of all ones": (gguf(version=2**32 - 1), "GGUF version 4294967295"),
    "big-endian version 2": (gguf(version=2 << 24), "big-endian"),
    "big-endian version 3": (gguf(version=3 << 24), "big-endian"),
    **{
        f"{count} tensors": (gguf(n_tensors=count), f"declares {count} tensors at byte 8, .* at most 0")
        for count in (1, 2**63, HUGE, 2**64 // 33 + 1)
    },
    **{
        f"{count} metadata entries": (gguf(n_metadata=count), f"declares {count} metadata entries at byte 16")
        for count in (1, 2**63, HUGE)
    },
    "one tensor too many": (gguf([], [tensor()], F32_DATA, n_tensors=9), "declares 9 tensors"),
    "one entry too many": (gguf([entry("k", U8, b"\1")], n_metadata=2), "declares 2 metadata entries"),
    # Keys
    "empty key": (gguf([entry("", STRING, text("x"))]), "key 0 of 1 at byte 24 has 0 bytes"),
    "key too long": (
        gguf([entry("k" * 65536, U8, b"\1")]),
        "key 0 of 1 .* has 65536 bytes, must have 1 to 65535",
    ),
    **{
        f"key of length {length}": (gguf([text("k", length=length) + bytes(16)]), f"has {length} bytes")
        for length in (2**31, 2**63 - 1, 2**63, HUGE)
    },
    "key past the end": (gguf([text("k", length=100) + bytes(16)]), "truncated: key 0 of 1"),
    "key not UTF-8": (gguf([entry(b"k\xff", U8, b"\1")]), "key 0 of 1 at byte 32 is not valid UTF-8"),
    "key of overlong UTF-8": (gguf([entry(b"k\xc0\x80", U8, b"\1")]), "not valid UTF-8"),
    "duplicate key": (gguf([entry("k", U8, b"\1")] * 2), "duplicate key k"),
    "duplicate key of another type": (
        gguf([entry("a.b", U8, b"\1"), entry("c", U8, b"\1"), entry("a.b", STRING, text("x"))]),
        "duplicate key a.b",
    ),
    # Values
    **{
        f"metadata type {kind}": (gguf([entry("k", kind, bytes(16))]), f"k has unknown metadata type {kind}")
        for kind in (13, 255, 2**31, 2**32 - 1)
    },
    **{
        f"scalar of type {kind} cut off": (
            gguf([entry("a" * 8, U8, b"\1"), entry("k", kind, scalar(kind, 1)[:-1])]),
            r"truncated: (k|.* room)",
        )
        for kind in SCALAR_FORMATS
        if len(scalar(kind, 1)) > 1
    },
    **{
        f"bool of value {b}": (gguf([entry("k", BOOL, bytes([b]))]), f"k .* bool of value {b}")
        for b in (2, 255)
    },
    **{
        f"string of length {length}": (
            gguf([entry("k", STRING, text("abc", length=length))]),
            "truncated: k at byte",
        )
        for length in (4, 2**63 - 1, HUGE, HUGE - 40)
    },
    "string not UTF-8": (gguf([entry("k", STRING, text(b"a\xff"))]), "k at byte 45 is not valid UTF-8"),
    "string that ends inside a character": (
        gguf([entry("k", STRING, text("ü".encode()[:1]))]),
        "not valid UTF-8",
    ),
    "surrogate in UTF-8": (gguf([entry("k", STRING, text(b"\xed\xa0\x80"))]), "not valid UTF-8"),
    # Arrays
    **{
        f"array of type {kind}": (
            gguf([entry("k", ARRAY, array(kind, [bytes(16)]))]),
            f"the elements of k has unknown metadata type {kind}",
        )
        for kind in (13, 2**32 - 1)
    },
    **{
        f"array of {count} elements of type {kind}": (
            gguf([entry("k", ARRAY, array(kind, [bytes(16)], count=count))]),
            f"declares {count} (elements|strings|arrays) in k",
        )
        for kind, count in [
            *((kind, 1000) for kind in range(13)),
            *((kind, HUGE) for kind in range(13)),
            (U32, 2**62),
        ]
    },
    "array one element short": (
        gguf([entry("k", ARRAY, array(U32, [u32(1)] * 3, count=4))]),
        "declares 4 elements in k .* room for at most 3",
    ),
    "array without a count": (gguf([entry("k", ARRAY, u32(U8) + bytes(7))]), "the number of elements in k"),
    "array of bools with a 2": (
        gguf([entry("k", ARRAY, array(BOOL, [b"\0", b"\1", b"\2"]))]),
        "k has a bool of value 2",
    ),
    **{
        f"string {position} of an array of length {length}": (
            gguf(
                [
                    entry(
                        "k",
                        ARRAY,
                        array(
                            STRING, [text("ab", length=length if n == position else None) for n in range(3)]
                        ),
                    )
                ]
            ),
            f"truncated: string {position} of 3 in k runs past the end",
        )
        for position, length in ((0, 1000), (1, 2**63 - 1), (2, 2**63), (2, HUGE))
    },
    "array of strings that ends inside a length": (
        gguf([entry("k", ARRAY, array(STRING, [text("a" * 20), bytes(7)], count=2))]),
        "truncated: string 1 of 2 in k",
    ),
    "arrays nested too deep": (
        gguf(
            [
                entry(
                    "k",
                    ARRAY,
                    array(ARRAY, [array(ARRAY, [array(ARRAY, [array(ARRAY, [array(U8, [b"\1"])])])])]),
                )
            ]
        ),
        "k nests arrays more than 4 deep",
    ),
    "inner array past the end": (
        gguf([entry("k", ARRAY, array(ARRAY, [array(U8, [b"\1"]), array(U64, [], count=5)]))]),
        "declares 5 elements in k",
    ),
    # Alignment
    **{
        f"alignment of type {kind}": (
            gguf([entry(ALIGNMENT, kind, scalar(kind, 1))]),
            f"{ALIGNMENT} has type .*, expected uint32",
        )
        for kind in SCALAR_FORMATS
        if kind != U32
    },
    "alignment as a string": (
        gguf([entry(ALIGNMENT, STRING, text("32"))]),
        "has type string, expected uint32",
    ),
    "alignment as an array": (
        gguf([entry(ALIGNMENT, ARRAY, array(U32, [u32(32)]))]),
        r"has type array\[uint32\], expected uint32",
    ),
    **{
        f"alignment {value}": (
            gguf([entry(ALIGNMENT, U32, u32(value))]),
            f"{ALIGNMENT} is {value}, must be a power",
        )
        for value in (0, 1, 2, 4, 3, 24, 33, 2**31 + 8, 2**32 - 1)
    },
    # Tensors
    "empty tensor name": (gguf([], [tensor("")], F32_DATA), "the name of tensor 0 of 1 .* has 0 bytes"),
    "tensor name too long": (gguf([], [tensor("n" * 65)], F32_DATA), "has 65 bytes, must have 1 to 64"),
    **{
        f"tensor name of length {length}": (
            gguf([], [text("t", length=length) + bytes(40)]),
            f"has {length} bytes",
        )
        for length in (2**31, 2**63, HUGE)
    },
    "tensor name not UTF-8": (gguf([], [tensor(b"t\x80")], F32_DATA), "not valid UTF-8"),
    "duplicate tensor": (
        gguf([], [tensor("a"), tensor("b", offset=128), tensor("a", offset=256)], bytes(384)),
        "duplicate tensor a",
    ),
    **{
        f"{n} dimensions": (
            gguf([], [tensor(n_dims=n)], bytes(256)),
            f"tensor t has {n} dimensions, must have 1 to 4",
        )
        for n in (0, 5, 8, 2**31, 2**32 - 1)
    },
    **{
        f"dimension {at} is zero": (
            gguf([], [tensor(dims=[0 if n == at else 32 for n in range(4)])], F32_DATA),
            "tensor t has shape .*, must have 1 to",
        )
        for at in range(4)
    },
    **{
        f"elements overflow: {dims}": (
            gguf([], [tensor(dims=dims)], F32_DATA),
            "tensor t has shape .*, must have 1 to",
        )
        for dims in (
            [2**63],
            [HUGE],
            [2**32, 2**32],
            [2**33, 2**33],
            [2**16] * 4,
            [3, 2**63, 1, 1],
            [2**62, 4, 2**62, 4],
        )
    },
    **{
        f"bytes overflow: {dims}": (
            gguf([], [tensor(dims=dims)], F32_DATA),
            "tensor t of .* past the end of the file",
        )
        for dims in ([2**62], [2**63 - 1], [2**31, 2**31], [2**40], [33])
    },
    **{
        f"tensor type {kind}": (gguf([], [tensor(kind=kind)], F32_DATA), f"tensor t has unknown type {kind}")
        for kind in (4, 31, 38, 1000, 2**32 - 1)
    },
    **{
        f"row of a {kind.name} tensor is not a multiple of the block": (
            gguf(
                [], [tensor(dims=[kind.block_values + kind.block_values // 2, 2], kind=number)], bytes(4096)
            ),
            f"must be a multiple of the {kind.name} block size {kind.block_values}",
        )
        for number, kind in TENSOR_TYPES.items()
        if kind.block_values > 1
    },
    **{
        f"offset {offset}": (
            gguf([], [tensor(offset=offset)], bytes(1024)),
            f"offset {offset}, .* alignment 32",
        )
        for offset in (1, 16, 33, HUGE)
    },
    "offset against a stated alignment": (
        gguf([entry(ALIGNMENT, U32, u32(64))], [tensor(offset=32)], bytes(1024), alignment=64),
        "offset 32, must be a multiple of the alignment 64",
    ),
    **{
        f"tensor at {offset}": (
            gguf([], [tensor(offset=offset)], F32_DATA),
            "tensor t of 128 bytes ends at byte",
        )
        for offset in (32, 128, 2**31, 2**63, 2**64 - 32, 2**64 - 128)
    },
    "tensor one byte short": (gguf([], [tensor()], F32_DATA[:-1]), "past the end of the file"),
    "second tensor one byte short": (
        gguf([], [tensor("a"), tensor("b", offset=128)], bytes(255)),
        "tensor b of 128 bytes ends at byte",
    ),
    "tensor without data": (gguf([], [tensor()]), "past the end of the file"),
    "tensors at one place": (gguf([], [tensor("a"), tensor("b")], F32_DATA), "tensors a and b overlap"),
    "tensors that overlap": (
        gguf([], [tensor("b", offset=96), tensor("a")], bytes(256)),
        "tensors a and b overlap at byte",
    ),
    "padding that would wrap": (
        gguf([entry(ALIGNMENT, U32, u32(2**31))], [tensor(offset=0)], F32_DATA),
        "past the end of the file",
    ),
}
