"""Parses GGUF files, and reassembles them with a few errors."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from support.files.gguf_bytes import ARRAY, SCALAR_FORMATS, STRING, Value, gguf, scalar, tensor, text
from support.files.gguf_reader import GGUFReader

INTEGERS = [
    *(0, 1, 2, 7, 8, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**60, 2**63 - 1, 2**63, 2**64 - 1),
]
FLOATS = [0.0, -0.0, -1.0, 1e-300, 1e-46, 1e-39, 1e38, 1e39, 1e300, float("nan"), float("inf"), float("-inf")]


@dataclass
class Parts:
    """A parsed file."""

    metadata: list[tuple[bytes, int, bytes]]  # key, number of the value's type, bytes of the value
    # Name, dimensions as in the file, number of the type, offset.
    tensors: list[tuple[str, list[int], int, int]]
    data: bytes  # bytes after the header
    options: dict[str, int] = field(default_factory=dict)

    def assemble(self) -> bytes:
        entries = [text(key) + struct.pack("<I", kind) + value for key, kind, value in self.metadata]
        tensors = [tensor(name, dims, kind, offset) for name, dims, kind, offset in self.tensors]
        return gguf(entries, tensors, self.data, **self.options)  # type: ignore[arg-type]

    def write(self, path: Path) -> Path:
        """Write a file of the parts."""
        path.write_bytes(self.assemble())
        return path

    def replace(self, key: bytes, value: bytes, kind: int | None = None) -> None:
        """Replace the value of a key and, if given, the number of its type."""
        i = next(i for i, (name, _, _) in enumerate(self.metadata) if name == key)
        self.metadata[i] = (key, self.metadata[i][1] if kind is None else kind, value)

    def replace_tensor(self, name: str, *, new_name: str | None = None, kind: int | None = None) -> None:
        """Change the name or the type number of a tensor, but not its bytes."""
        i = next(i for i, tensor in enumerate(self.tensors) if tensor[0] == name)
        _, dims, held, offset = self.tensors[i]
        self.tensors[i] = (new_name or name, dims, held if kind is None else kind, offset)


def with_entries(path: Path, whole: Path, entries: Mapping[str, Value | None]) -> Path:
    """Write a copy of a file with other values of keys, or without them."""
    parts = take_apart(whole)
    parts.metadata = [entry for entry in parts.metadata if entry[0].decode() not in entries]
    parts.metadata += [(key.encode(), *value) for key, value in entries.items() if value is not None]
    return parts.write(path)


def take_apart(path: Path) -> Parts:
    """Read a valid file."""
    reader = GGUFReader(path)
    fields = [field.parts for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    metadata = [
        (key.tobytes(), int(kind[0]), b"".join(part.tobytes() for part in value))
        for _, key, kind, *value in fields
    ]
    tensors = [
        (t.name, t.shape.tolist(), int(t.tensor_type), int(t.data_offset) - reader.data_offset)
        for t in reader.tensors
    ]
    return Parts(metadata, tensors, path.read_bytes()[reader.data_offset :])


def mutate(parts: Parts, random: Random) -> bytes:
    """Return a file that differs from `parts` in a few places."""
    changed = Parts(list(parts.metadata), list(parts.tensors), parts.data, dict(parts.options))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice((_number, _number, _value_type, _entry, _array, _tensor, _tensor, _counts, _weights))(
            changed, random
        )
    content = bytearray(changed.assemble())
    if random.random() < 0.1:
        del content[random.randrange(len(content)) :]
    if random.random() < 0.2:
        header = len(content) - len(changed.data)
        for _ in range(random.choice((1, 1, 4, 16))):
            if content:
                content[random.randrange(max(1, min(header, len(content))))] = random.randrange(256)
    return bytes(content)


def _some(parts: Parts, random: Random, wanted: bool) -> int | None:
    """Choose an entry with an array, or one with another value."""
    found = [i for i, (_, kind, _) in enumerate(parts.metadata) if (kind == ARRAY) == wanted]
    return random.choice(found) if found else None


def random_scalar(kind: int, random: Random, integers: Sequence[int] = INTEGERS) -> bytes:
    """Return a number of a type, often one at the ends of its range."""
    form = SCALAR_FORMATS[kind]
    if form[-1] in "fd":
        value: float = random.choice(FLOATS)
        if form[-1] == "f" and abs(value) > 3e38:
            value = float("inf")
    else:
        bits = 8 * struct.calcsize(form)
        value = random.choice(integers) % 2**bits
        if form[-1].islower():
            value -= 2**bits if value >= 2 ** (bits - 1) else 0
    return scalar(kind, value)


def _number(parts: Parts, random: Random) -> None:
    """Change the value of a number, and often its type."""
    i = _some(parts, random, wanted=False)
    if i is None:
        return
    key, kind, _ = parts.metadata[i]
    if kind == STRING:
        value = text(random.choice((b"", b"x" * 5000, b"\xff", b"yarn", b"llama", b"gpt2")))
    else:
        other = random.choice(list(SCALAR_FORMATS))
        kind = random.choice((kind, other)) if kind in SCALAR_FORMATS else other
        value = random_scalar(kind, random)
    parts.metadata[i] = (key, kind, value)


def _value_type(parts: Parts, random: Random) -> None:
    """Give a value another type than its bytes."""
    i = random.randrange(len(parts.metadata))
    key, _, value = parts.metadata[i]
    parts.metadata[i] = (key, random.choice((*range(14), 2**32 - 1)), value)


def _entry(parts: Parts, random: Random) -> None:
    """Drop an entry, repeat one, or rename one."""
    i = random.randrange(len(parts.metadata))
    key, kind, value = parts.metadata[i]
    other = parts.metadata[random.randrange(len(parts.metadata))][0]
    choice = random.randrange(4)
    if choice == 0:
        del parts.metadata[i]
        parts.metadata = parts.metadata or [(key, kind, value)]
    elif choice == 1:
        parts.metadata.append((key, kind, value))
    else:
        names = (other, other, other, b"", b"k" * 70000, b"\xc3")
        parts.metadata[i] = (random.choice(names), kind, value)


def _array(parts: Parts, random: Random) -> None:
    """Change the count of an array, the type of its elements, or some of its bytes."""
    i = _some(parts, random, wanted=True)
    if i is None:
        return
    key, kind, value = parts.metadata[i]
    if len(value) < 12:  # its type was changed from another one
        return
    element, count = struct.unpack_from("<IQ", value)
    body = bytearray(value[12:])
    choice = random.randrange(3)
    if choice == 0:
        count = random.choice((*INTEGERS, count + 1, max(count - 1, 0)))
    elif choice == 1:
        element = random.randrange(14)
    else:
        for _ in range(random.choice((1, 8))):
            if body:
                body[random.randrange(len(body))] = random.choice((0, 0xFF, random.randrange(256)))
    parts.metadata[i] = (key, kind, struct.pack("<IQ", element, count % 2**64) + body)


def _tensor(parts: Parts, random: Random) -> None:
    """Change the name, dimensions, type or offset of a tensor, drop it, or repeat it."""
    i = random.randrange(len(parts.tensors))
    name, dims, kind, offset = parts.tensors[i]
    choice = random.randrange(6)
    if choice == 0:
        name = random.choice(("", "x" * 65, parts.tensors[0][0], "output.weight", "rope_freqs.weight"))
    elif choice == 1 and dims:  # an earlier change may have removed them
        dims = list(dims)
        dims[random.randrange(len(dims))] = random.choice((*INTEGERS, dims[0] * 2, dims[0] + 32))
    elif choice == 2:
        dims = random.choice(([], [1], dims[:1], [*dims, 1], [*dims, 1, 1, 1]))
    elif choice == 3:
        kind = random.choice((*range(42), 2**32 - 1))
    elif choice == 4:
        offset = random.choice((*INTEGERS, offset + 32, max(offset - 32, 0)))
    else:
        parts.tensors.append(parts.tensors[i])
    parts.tensors[i] = (name, dims, kind, offset)


def _counts(parts: Parts, random: Random) -> None:
    """Claim another version, or other numbers of tensors and entries."""
    name = random.choice(("version", "n_tensors", "n_metadata"))
    value = random.choice(INTEGERS)
    parts.options[name] = value % 2**32 if name == "version" else value


def _weights(parts: Parts, random: Random) -> None:
    """Damage weights, for example by NaN and infinity."""
    data = bytearray(parts.data)
    for _ in range(random.choice((1, 16, 256))):
        at = random.randrange(len(data) - 4)
        values = (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4, random.randbytes(4))
        data[at : at + 4] = random.choice(values)
    parts.data = bytes(data)
