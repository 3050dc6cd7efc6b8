"""Every known way in which a GGUF file can be invalid, and errors that name the problem.

The cases follow defects of other readers: counts and sizes that overflow when summed or multiplied, lengths
that are trusted, types that are not checked, tensors outside the file.
"""

import tracemalloc
from pathlib import Path

import pytest
from support.files.gguf_bytes import (
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

from metal_prefill import GGUFError
from metal_prefill.files import GGUFFile
from metal_prefill.files._gguf_file import TENSOR_TYPES

HUGE = 2**64 - 1
ALIGNMENT = "general.alignment"
DATA = bytes(128)  # of the tensor that `tensor` describes
ONE = array(U8, [b"\1"])
SHORT, ELEMENTS = "past the end of the file", "tensor t has shape .*, must have 1 to"
STRINGS = "truncated: string {} of 3 in k runs past the end"


def value(kind: int, content: bytes, key: str | bytes = "k") -> bytes:
    """Return a file with one entry of the metadata."""
    return gguf([entry(key, kind, content)])


def nested(*arrays: bytes) -> bytes:
    return array(ARRAY, arrays)


def listed(*tensors: bytes, data: bytes = DATA) -> bytes:
    """Return a file with these entries of the list of tensors."""
    return gguf([], tensors, data)


def aligned(alignment: int, offset: int = 0, data: bytes = DATA) -> bytes:
    return gguf([entry(ALIGNMENT, U32, u32(alignment))], [tensor(offset=offset)], data, alignment=64)


# Contents of files, and patterns of the messages.
INVALID: list[tuple[bytes, str]] = [
    (b"GGML" + gguf()[4:], "not a GGUF file: begins with b'GGML'"),
    (gguf(magic=b"gguf"), "not a GGUF file"),
    (b"GGU", "not a GGUF file: begins with b'GGU'"),
    *((gguf(version=n), f"GGUF version {n} is not one of 2, 3") for n in (0, 1, 4, 2**32 - 1)),
    *((gguf(version=n << 24), "big-endian") for n in (2, 3)),
    *(
        (gguf(n_tensors=n), f"declares {n} tensors at byte 8, .* at most 0")
        for n in (1, 2**63, HUGE, 2**64 // 33 + 1)
    ),
    *((gguf(n_metadata=n), f"declares {n} metadata entries at byte 16") for n in (1, 2**63, HUGE)),
    (gguf([], [tensor()], DATA, n_tensors=9), "declares 9 tensors"),
    (gguf([entry("k", U8, b"\1")], n_metadata=2), "declares 2 metadata entries"),
    # Keys
    (value(STRING, text("x"), key=""), "key 0 of 1 at byte 24 has 0 bytes"),
    (value(U8, b"\1", key="k" * 65536), "key 0 of 1 .* has 65536 bytes, must have 1 to 65535"),
    *(
        (gguf([text("k", length=n) + bytes(16)]), f"has {n} bytes")
        for n in (2**31, 2**63 - 1, 2**63, HUGE)
    ),
    (gguf([text("k", length=100) + bytes(16)]), "truncated: key 0 of 1"),
    (value(U8, b"\1", key=b"k\xff"), "key 0 of 1 at byte 32 is not valid UTF-8"),
    (value(U8, b"\1", key=b"k\xc0\x80"), "not valid UTF-8"),
    (gguf([entry("k", U8, b"\1")] * 2), "duplicate key k"),
    (gguf([entry(k, U8, b"\1") for k in "ab"] + [entry("a", STRING, text("x"))]), "duplicate key a"),
    # Values
    *((value(n, bytes(16)), f"k has unknown metadata type {n}") for n in (13, 255, 2**31, 2**32 - 1)),
    *(
        (gguf([entry("a" * 8, U8, b"\1"), entry("k", n, scalar(n, 1)[:-1])]), r"truncated: (k|.* room)")
        for n in SCALAR_FORMATS if len(scalar(n, 1)) > 1
    ),
    *((value(BOOL, bytes([n])), f"k .* bool of value {n}") for n in (2, 255)),
    *(
        (value(STRING, text("abc", length=n)), "truncated: k at byte")
        for n in (4, 2**63 - 1, HUGE, HUGE - 40)
    ),
    (value(STRING, text(b"a\xff")), "k at byte 45 is not valid UTF-8"),
    *((value(STRING, text(content)), "not valid UTF-8") for content in (b"\xc3", b"\xed\xa0\x80")),
    # Arrays
    *(
        (value(ARRAY, array(n, [bytes(16)])), f"the elements of k has unknown metadata type {n}")
        for n in (13, 2**32 - 1)
    ),
    *(
        (value(ARRAY, array(kind, [bytes(16)], count=n)), f"declares {n} (elements|strings|arrays) in k")
        for kind, n in (*((kind, n) for kind in range(13) for n in (1000, HUGE)), (U32, 2**62))
    ),
    (value(ARRAY, array(U32, [u32(1)] * 3, count=4)), "declares 4 elements in k .* room for at most 3"),
    (value(ARRAY, u32(U8) + bytes(7)), "the number of elements in k"),
    (value(ARRAY, array(BOOL, [b"\0", b"\1", b"\2"])), "k has a bool of value 2"),
    *(
        (
            value(ARRAY, array(STRING, [text("ab", length=n if i == at else None) for i in range(3)])),
            STRINGS.format(at),
        )
        for at, n in ((0, 1000), (1, 2**63 - 1), (2, 2**63), (2, HUGE))
    ),
    (value(ARRAY, array(STRING, [text("a" * 20), bytes(7)], count=2)), "truncated: string 1 of 2 in k"),
    (value(ARRAY, nested(nested(nested(nested(ONE))))), "k nests arrays more than 4 deep"),
    (value(ARRAY, nested(ONE, array(U64, [], count=5))), "declares 5 elements in k"),
    # Alignment
    *(
        (value(n, scalar(n, 1), ALIGNMENT), f"{ALIGNMENT} has type .*, expected uint32")
        for n in SCALAR_FORMATS if n != U32
    ),
    (value(STRING, text("32"), ALIGNMENT), "has type string, expected uint32"),
    (value(ARRAY, array(U32, [u32(32)]), ALIGNMENT), r"has type array\[uint32\], expected uint32"),
    *(
        (value(U32, u32(n), ALIGNMENT), f"{ALIGNMENT} is {n}, must be a power")
        for n in (0, 1, 2, 4, 3, 24, 33, 2**31 + 8, 2**32 - 1)
    ),
    # Tensors
    (listed(tensor("")), "the name of tensor 0 of 1 .* has 0 bytes"),
    (listed(tensor("n" * 65)), "has 65 bytes, must have 1 to 64"),
    *((listed(text("t", length=n) + bytes(40)), f"has {n} bytes") for n in (2**31, 2**63, HUGE)),
    (listed(tensor(b"t\x80")), "not valid UTF-8"),
    (listed(*(tensor(t, offset=128 * i) for i, t in enumerate("aba")), data=DATA * 3), "duplicate tensor a"),
    *(
        (listed(tensor(n_dims=n), data=bytes(256)), f"tensor t has {n} dimensions, must have 1 to 4")
        for n in (0, 5, 8, 2**31, 2**32 - 1)
    ),
    *((listed(tensor(dims=[32 * (i != at) for i in range(4)])), ELEMENTS) for at in range(4)),
    *(
        (listed(tensor(dims=dims)), ELEMENTS)
        for dims in (
            [2**63], [HUGE], [2**32, 2**32], [2**33, 2**33], [2**16] * 4, [3, 2**63, 1, 1],
            [2**62, 4, 2**62, 4],
        )
    ),
    *(
        (listed(tensor(dims=dims)), f"tensor t of .* {SHORT}")
        for dims in ([2**62], [2**63 - 1], [2**31, 2**31], [2**40], [33])
    ),
    *((listed(tensor(kind=n)), f"tensor t has unknown type {n}") for n in (4, 31, 38, 1000, 2**32 - 1)),
    *(
        (
            listed(tensor(dims=[kind.block_values * 3 // 2, 2], kind=n), data=bytes(4096)),
            f"must be a multiple of the {kind.name} block size {kind.block_values}",
        )
        for n, kind in TENSOR_TYPES.items() if kind.block_values > 1
    ),
    *(
        (listed(tensor(offset=n), data=bytes(1024)), f"offset {n}, .* alignment 32")
        for n in (1, 16, 33, HUGE)
    ),
    (aligned(64, offset=32, data=bytes(1024)), "offset 32, must be a multiple of the alignment 64"),
    *(
        (listed(tensor(offset=n)), "tensor t of 128 bytes ends at byte")
        for n in (32, 128, 2**31, 2**63, 2**64 - 32, 2**64 - 128)
    ),
    (listed(tensor(), data=DATA[:-1]), SHORT),
    (listed(tensor("a"), tensor("b", offset=128), data=bytes(255)), "tensor b of 128 bytes ends at byte"),
    (listed(tensor(), data=b""), SHORT),
    (listed(tensor("a"), tensor("b")), "tensors a and b overlap"),
    (listed(tensor("b", offset=96), tensor("a"), data=bytes(256)), "tensors a and b overlap at byte"),
    (aligned(2**31), SHORT),  # whose padding would wrap
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), INVALID, ids=[message for _, message in INVALID])
def test_an_invalid_file_is_rejected_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=message) as error:
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(error.value).startswith(f"{path}: ")
    assert peak < 200_000 + 4 * len(content)  # nothing is allocated from a declared length alone
