"""Tensors in a file of ``torch.save``, read without executing its pickle.

Such a file is a zip archive. Its ``data.pkl`` names the tensors, and the numbers of each are in a file of
their own, uncompressed. A pickle is a program. The opcodes that build dictionaries, tuples, numbers and
strings are interpreted here, and some names are known; any other opcode or name is an error.
"""

import math
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._weights import MAX_NAME, Weight

_MAX_PICKLE = 1 << 20  # bytes; a head with two tensors has some hundred
_TYPES = {
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch DoubleStorage": "F64",
    "torch LongStorage": "I64",
}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8}
_REBUILD, _ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(NamedTuple):
    name: str  # module and name, separated by a space


class _Storage(NamedTuple):
    dtype: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def read_torch_file(path: Path) -> dict[str, Weight]:
    """List the tensors of a file by name."""
    file = Fields(path, {})
    try:
        with zipfile.ZipFile(path) as archive:
            found, members = _contents(file, archive), {m.filename: m for m in archive.infolist()}
    except zipfile.BadZipFile:
        raise file.unsupported(
            "is not a zip archive, the format of torch.save since version 1.6; save it again as safetensors"
        ) from None
    weights = {}
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor) or len(name) > MAX_NAME:
            raise file.unsupported(f"{name!r} is not the name of a tensor")
        member = next((m for n, m in members.items() if n.endswith(f"/data/{tensor.storage.key}")), None)
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise file.error(f"data/{tensor.storage.key} is missing or compressed")
        size = _BYTES[tensor.storage.dtype]
        start = _place(path, member) + tensor.offset * size
        count = math.prod(tensor.shape)
        if (tensor.offset + count) * size > member.file_size:
            raise file.error(f"tensor {name} has shape {tensor.shape}, more than data/{tensor.storage.key}")
        weights[name] = Weight(path, name, tensor.storage.dtype, tensor.shape, start, start + count * size)
    return weights


def _contents(file: Fields, archive: zipfile.ZipFile) -> dict[Any, Any]:
    names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1 or archive.getinfo(names[0]).file_size > _MAX_PICKLE:
        raise file.unsupported(f"has no data.pkl of at most {_MAX_PICKLE} bytes")
    order = names[0].removesuffix("data.pkl") + "byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise file.unsupported("byteorder is not little")
    try:
        value = _unpickled(file, archive.read(names[0]))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise file.error(f"data.pkl is damaged: {error!r}") from None
    if not isinstance(value, dict):
        raise file.unsupported(f"contains a {type(value).__name__}, expected a dictionary of tensors")
    return value


def _unpickled(file: Fields, data: bytes) -> Any:
    """Interpret a pickle of plain tensors."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def popped() -> list[Any]:
        """Remove the values above the last mark."""
        first = marks.pop()
        values, stack[first:] = stack[first:], []
        return values

    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE":
                stack.append(tuple(popped()))
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                n = _TUPLES[opcode.name]
                items = tuple(stack.pop() for _ in range(n))[::-1]
                stack.append(items)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL" if argument in (_REBUILD, _ORDERED, *_TYPES):
                stack.append(_Name(argument))
            case "BINPERSID":
                _, kind, key, *_ = stack.pop()
                stack.append(_Storage(_TYPES[kind.name], str(key)))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_called(file, function, arguments))
            case "SETITEM" | "SETITEMS":
                values = popped() if opcode.name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
                stack[-1].update(zip(values[::2], values[1::2], strict=True))
            case "BUILD":
                stack.pop()  # attributes, such as the versions of modules
            case _:
                what = f"{opcode.name} {argument}" if argument is not None else opcode.name
                raise file.unsupported(
                    f"its pickle contains {what}; only plain tensors are read, as pickles can execute code. "
                    "Save it as safetensors"
                )
    raise ValueError("it has no end")


def _called(file: Fields, function: Any, arguments: tuple[Any, ...]) -> Any:
    """Call the constructor of a name: it makes a dictionary or a tensor."""
    if function == _Name(_ORDERED) and not arguments:
        return {}
    if function != _Name(_REBUILD):
        raise ValueError(f"{function!r} is called")
    storage, offset, shape, strides = arguments[:4]
    if not all(isinstance(n, int) and n >= 0 for n in (offset, *shape, *strides)):
        raise ValueError("a size of a tensor is not a number")
    packed = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if tuple(strides) != packed or not isinstance(storage, _Storage):
        raise file.unsupported(f"a tensor of shape {shape} is not contiguous")
    return _Tensor(storage, offset, tuple(shape))


def _place(path: Path, member: zipfile.ZipInfo) -> int:
    """Return the position of the first byte of an uncompressed member, after its local header."""
    with open(path, "rb") as file:
        file.seek(member.header_offset + 26)
        lengths = file.read(4)
    name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    return member.header_offset + 30 + name + extra
