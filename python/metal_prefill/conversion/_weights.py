"""Tensors of a model folder: one safetensors file, or several that an index lists.

The library validates the headers. Values are then read with the offsets of the header, since NumPy has no
bfloat16. No other format is read: files of pickled objects can execute code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from metal_prefill._support.messages import shortened
from metal_prefill.conversion._folder import MAX_FILE_NAME, Fields
from metal_prefill.errors import GGUFError, UnsupportedModelError
from metal_prefill.files._other_formats import RECOGNIZED_BYTES, in_place_of_file

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")
MAX_SHARDS = 1000
MAX_NAME, MAX_DIMS = 500, 8  # of a tensor; longer names and shapes would make long messages

# A matrix of an expert, one of as many tensors.
_OF_EXPERT = re.compile(r"(.+\.experts)\.(0|[1-9]\d{0,8})\.(.+)")
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_INTEGERS = {"I64": "<i8", "I32": "<i4"}
FloatArray: TypeAlias = npt.NDArray[np.float32]
Index: TypeAlias = slice | npt.NDArray[np.intp]  # of rows or columns
Compute: TypeAlias = Callable[[Index], FloatArray]
ALL = slice(None)
BLOCK = 1 << 20  # values that are converted at once: 4 MiB of float32


@dataclass(frozen=True)
class Weight:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    dtype: str  # number type as the format names it, such as ``"BF16"``
    shape: tuple[int, ...]
    # Position of the first byte in the file, and of the byte after the last.
    start: int
    end: int

    def error(self, message: str) -> GGUFError:
        """Return, without raising it, an error that names the file and the tensor."""
        return GGUFError(f"{self.file}: tensor {self.name} {message}")

    def check_shape(self, expected: tuple[int, ...]) -> None:
        if self.shape != expected:
            raise self.error(f"has shape {self.shape}, expected {expected}")

    def parts(self, names: tuple[str, ...]) -> list[Weight]:
        """Divide the rows into equal parts, and name these."""
        rows = self.shape[0] if self.shape else 1
        if rows % len(names):
            raise self.error(f"has {rows} rows, which {len(names)} parts do not divide")
        shape = (rows // len(names), *self.shape[1:])
        size = (self.end - self.start) // len(names)
        return [self._part(i, name, shape, size) for i, name in enumerate(names)]

    def _part(self, i: int, name: str, shape: tuple[int, ...], size: int) -> Weight:
        start = self.start + i * size
        return replace(self, name=name, shape=shape, start=start, end=start + size)

    def named(self, name: str) -> Computed:
        return self.computed(self.rows, name=name)

    def computed(
        self, compute: Compute, *, name: str | None = None, shape: tuple[int, ...] | None = None
    ) -> Computed:
        """Return a tensor that follows from this one, and has its name and shape unless others are given."""
        name, shape = self.name if name is None else name, self.shape if shape is None else shape
        return Computed(self.file, name, self.dtype, shape, 0, 0, compute)

    def reordered(self, order: npt.NDArray[np.intp]) -> Computed:
        return self.computed(lambda index: self.rows(order[index]), shape=(len(order), *self.shape[1:]))

    def transposed(self) -> Computed:
        return self.computed(self.columns, shape=self.shape[::-1])

    def blocks(self) -> Iterator[FloatArray]:
        """Read all rows as float32, some at a time: a block has at most `BLOCK` values, or one row."""
        rows = self.shape[0]
        step = max(BLOCK * rows // math.prod(self.shape), 1)
        for first in range(0, rows, step):
            yield self.rows(slice(first, min(first + step, rows)))

    def rows(self, index: Index = ALL) -> FloatArray:
        """Read rows as float32; of a vector, values.

        Raises GGUFError if a value is not finite, or the file was truncated; UnsupportedModelError if the
        tensor does not contain floating-point numbers.
        """
        wanted = np.arange(self.shape[0])[index]
        if wanted.size == 0:
            return np.empty((0, *self.shape[1:]), np.float32)
        first = int(wanted.min())
        raw = self._read(_DTYPES, first, int(wanted.max()) + 1)
        return self._finite(self._floats(raw[wanted - first]))

    def columns(self, index: Index) -> FloatArray:
        """Read a whole matrix, and return columns as rows; see `rows`."""
        return self._finite(self._floats(self._read(_DTYPES, 0, self.shape[0]).T[index]))

    def integers(self) -> npt.NDArray[np.int64]:
        return (
            self._read(_INTEGERS, 0, self.shape[0] if self.shape else 1).astype(np.int64).reshape(self.shape)
        )

    def _finite(self, values: FloatArray) -> FloatArray:
        if not np.isfinite(values).all():
            raise self.error("contains a value that is not finite")
        return values

    def _floats(self, raw: npt.NDArray[Any]) -> FloatArray:
        if self.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):  # float64 beyond the range becomes infinite
            return raw.astype(np.float32)

    def _read(self, dtypes: Mapping[str, str], first: int, last: int) -> npt.NDArray[Any]:
        """Read the rows from `first` to before `last` as numbers of the file's type."""
        if self.dtype not in dtypes:
            raise UnsupportedModelError(
                f"{self.file}: tensor {self.name} has type {self.dtype}; supported are {', '.join(dtypes)}"
            )
        dtype, shape = np.dtype(dtypes[self.dtype]), (last - first, *self.shape[1:])
        offset = self.start + first * math.prod(self.shape[1:]) * dtype.itemsize
        try:
            raw = np.fromfile(self.file, dtype, math.prod(shape), offset=offset)
        except MemoryError:
            raise self.error(f"has {self.end - self.start} bytes, which cannot be allocated") from None
        if raw.size != math.prod(shape):
            raise GGUFError(f"{self.file}: was truncated; tensor {self.name} ends at byte {self.end}")
        return raw.reshape(shape)


@dataclass(frozen=True)
class Computed(Weight):
    """A tensor that follows from others; errors name the file and the first of those."""

    compute: Compute  # function that returns rows by their index

    def rows(self, index: Index = ALL) -> FloatArray:
        return self._finite(self.compute(index))

    def columns(self, index: Index) -> FloatArray:
        return self.rows().T[index]

    def _part(self, i: int, name: str, shape: tuple[int, ...], size: int) -> Weight:
        rows = np.arange(i * shape[0], (i + 1) * shape[0])
        return self.computed(lambda index: self.rows(rows[index]), name=name, shape=shape)


@dataclass(frozen=True)
class Stack(Weight):
    """Matrices of the same shape, one of each expert, as a tensor ``[experts, rows, columns]``."""

    matrices: tuple[Weight, ...]

    @classmethod
    def of(cls, name: str, matrices: tuple[Weight, ...]) -> Stack:
        first = matrices[0]
        return cls(first.file, name, first.dtype, (len(matrices), *first.shape), 0, 0, matrices)

    @classmethod
    def divided(cls, weight: Weight) -> Stack:
        matrices = weight.parts((weight.name,) * weight.shape[0])
        return cls.of(weight.name, tuple(replace(matrix, shape=weight.shape[1:]) for matrix in matrices))

    def parts(self, names: tuple[str, ...]) -> list[Weight]:
        of_parts = zip(*(matrix.parts(names) for matrix in self.matrices), strict=True)
        return [Stack.of(name, matrices) for name, matrices in zip(names, of_parts, strict=True)]

    def blocks(self) -> Iterator[FloatArray]:
        for matrix in self.matrices:
            yield from matrix.blocks()


def read_weights(folder: Path) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for file in _files(folder):
        for weight in listed_tensors(file):
            if weight.name in weights:
                raise GGUFError(f"{file}: tensor {weight.name} is also in {weights[weight.name].file.name}")
            weights[weight.name] = weight
    return weights


def _stacked(weights: Mapping[str, Weight]) -> Iterator[Weight]:
    """Yield weights, and instead of numbered matrices of experts a stack of each kind."""
    numbered: dict[str, dict[int, Weight]] = {}
    for name, weight in weights.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            yield weight
        else:
            numbered.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weight
    for name, matrices in numbered.items():
        first = next(iter(matrices.values()))
        for expert, matrix in matrices.items():
            if expert >= len(matrices):
                missing = next(i for i in range(len(matrices)) if i not in matrices)
                raise GGUFError(f"{matrix.file}: has tensor {matrix.name}, but none of expert {missing}")
            if matrix.shape != first.shape:
                raise matrix.error(f"has shape {matrix.shape}, but {first.name} has {first.shape}")
        yield Stack.of(name, tuple(matrices[i] for i in range(len(matrices))))


def divided(weights: Mapping[str, Weight], parts: Mapping[str, tuple[str, ...]]) -> Iterator[Weight]:
    """Yield weights, and instead of one with a name in `parts` its parts; see `Source.parts`.

    Matrices of experts become stacks.
    """
    for weight in _stacked(weights):
        name = weight.name
        module, _, suffix = name.rpartition(".")
        end = next((end for end in parts if module.endswith(f".{end}")), None)
        if end is None:
            yield weight
        else:
            is_whole = len(weight.shape) == 3 and not isinstance(weight, Stack)
            whole = Stack.divided(weight) if is_whole else weight
            yield from whole.parts(tuple(f"{module.removesuffix(end)}{own}.{suffix}" for own in parts[end]))


def read_module(folder: Path) -> Mapping[str, Weight]:
    """List the tensors of a module of sentence-transformers, such as ``2_Dense``."""
    file = folder / FILE
    if not file.is_file():
        raise _no_weights(folder)
    return {weight.name: weight for weight in listed_tensors(file)}


def ignored_index(folder: Path) -> str:
    """Return a note for errors if a folder has both a file and an index, of which the file counts.

    That is the order of transformers. One of the two may be left from an earlier version of the model.
    """
    if not all((folder / name).is_file() for name in (FILE, INDEX)):
        return ""
    return f" (the weights are those of {FILE}, as in transformers; {INDEX} is ignored)"


def _files(folder: Path) -> list[Path]:
    if (folder / FILE).is_file():
        return [folder / FILE]
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    index = Fields.read(folder / INDEX)
    stated = index.object("weight_map").values.values()
    if not all(isinstance(name, str) for name in stated):
        raise index.error("weight_map must name a file for each tensor")
    names = set(stated)
    if not names or len(names) > MAX_SHARDS:
        raise index.error(f"weight_map names {len(names)} files, must name 1 to {MAX_SHARDS}")
    files = []
    for name in sorted(names):
        plain = name == Path(name).name and len(name.encode()) <= MAX_FILE_NAME
        if not plain or not name.endswith(".safetensors"):
            raise index.error(f"weight_map names {name!r}, must name safetensors files in this folder")
        if not (folder / name).is_file():
            raise index.error(f"weight_map names {name}, which is missing")
        files.append(folder / name)
    return files


def _no_weights(folder: Path) -> GGUFError | UnsupportedModelError:
    pickled = [name for name in PICKLED if (folder / name).exists()]
    if pickled:
        return UnsupportedModelError(
            f"{folder}: has its weights in {pickled[0]}, a format that can execute code and is never loaded; "
            "save them as safetensors: in transformers, model.save_pretrained(folder)"
        )
    return GGUFError(f"{folder}: has neither {FILE} nor {INDEX}")


def listed_tensors(file: Path) -> Iterator[Weight]:
    try:
        with safe_open(file, "np") as opened:
            names = list(opened.keys())
    except SafetensorError as error:
        with open(file, "rb") as stream:
            found = in_place_of_file(stream.read(RECOGNIZED_BYTES))
        kind = f"a safetensors file, but {found}" if found else f"a valid safetensors file: {error}"
        raise GGUFError(shortened(f"{file}: is not {kind}")) from None
    except MemoryError:
        raise GGUFError(f"{file}: has {file.stat().st_size} bytes, which cannot be mapped") from None
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))  # the library has parsed and checked it
    for name in names:
        entry = header[name]
        if len(name) > MAX_NAME or len(entry["shape"]) > MAX_DIMS:
            raise GGUFError(
                f"{file}: tensor {name[:MAX_NAME]} has a name of {len(name)} characters and "
                f"{len(entry['shape'])} dimensions; the limits are {MAX_NAME} and {MAX_DIMS}"
            )
        first, last = entry["data_offsets"]
        yield Weight(file, name, entry["dtype"], tuple(entry["shape"]), 8 + size + first, 8 + size + last)
