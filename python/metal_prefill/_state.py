"""Saved sessions: the cache, and the tokens it was computed from, in a safetensors file.

The file holds ``tokens`` (int32 ``[n]``) and, for each layer i, ``layer.i.key`` and ``layer.i.value``
(``[n, n_kv_heads, head_dim]`` in the cache's dtype). Its metadata say what it belongs to:

=================  =============================================================================
``format``         ``metal_prefill.session``
``version``        of this layout, ``1``
``model``          :func:`fingerprint` of the GGUF file
``model_file``     its name, for messages
``kv_dtype``       ``f16`` or ``f32``
``notes``          what the user put in ``Session.notes``
``checksum``       XXH64 of all tensors and of the other metadata, 16 hexadecimal digits
=================  =============================================================================

The layout knows no engine: what one device saved, another continues.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from metal_prefill._replacing import replacing
from metal_prefill.architecture import ModelConfig
from metal_prefill.errors import StateError
from metal_prefill.gguf_file import GGUFFile

FORMAT = "metal_prefill.session"
VERSION = "1"
CHECKSUM = "checksum"
TOKENS = "tokens"

_KV_DTYPES = {"f16": "F16", "f32": "F32"}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
}
_SAMPLES, _SAMPLE_BYTES = 4, 1024  # of each tensor, for the fingerprint

Bytes: TypeAlias = npt.NDArray[np.uint8]


def fingerprint(gguf: GGUFFile) -> str:
    """Return a hash that tells one model file from another, 32 hexadecimal digits.

    It covers the file's size, its whole header (metadata, vocabulary, names, shapes and types of tensors)
    and, of every tensor, four pieces of 1 KiB from its first byte to its last. So it takes milliseconds
    however large the file is, and any training, conversion or quantization changes it; a few bytes edited
    by hand inside a tensor may not.
    """
    data = gguf.mapping.data
    digest = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    digest.update(data[: gguf.data_offset])
    for tensor in gguf.tensors.values():
        last = max(tensor.nbytes - _SAMPLE_BYTES, 0)
        for start in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            begin = tensor.offset + start
            digest.update(data[begin : min(begin + _SAMPLE_BYTES, tensor.offset + tensor.nbytes)])
    return digest.hexdigest()


@dataclass(frozen=True)
class Owner:
    """What a state belongs to.

    Attributes
    ----------
    config : ModelConfig
    kv_dtype : str
        ``f16`` or ``f32``.
    fingerprint : str
        Of the model file.
    name : str
        Of the model file, for messages.
    """

    config: ModelConfig
    kv_dtype: str
    fingerprint: str
    name: str

    def tensors(self, n: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor of a state of `n` tokens: keys and values of each layer in turn."""
        c, dtype = self.config, _KV_DTYPES[self.kv_dtype]
        kinds = (("key", c.key_dim), ("value", c.value_dim))
        return {
            f"layer.{layer}.{kind}": (dtype, (n, c.n_kv_heads, dim))
            for layer in range(c.n_layers)
            for kind, dim in kinds
        }


class State(NamedTuple):
    """What a session holds.

    Attributes
    ----------
    tokens : numpy.ndarray
        Ids in the cache, int32 ``[n]``.
    rows : list of numpy.ndarray
        Bytes of K and V of each layer in turn, in canonical layout ``[n, n_kv_heads, head_dim]``.
    notes : str
        The user's own.
    """

    tokens: npt.NDArray[np.int32]
    rows: list[Bytes]
    notes: str = ""


def write(path: str | os.PathLike[str], owner: Owner, state: State) -> None:
    """Write a state, or leave what was at `path` untouched.

    An existing file is replaced in one step, once the new one is on the disk.

    Raises
    ------
    OutputError
        A device, a FIFO or a socket is there.
    OSError
        The file cannot be written.
    """
    arrays: dict[str, npt.NDArray[Any]] = {TOKENS: state.tokens}
    for (name, (dtype, shape)), raw in zip(owner.tensors(len(state.tokens)).items(), state.rows, strict=True):
        arrays[name] = raw.view(_NUMPY_DTYPES[dtype]).reshape(shape)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": owner.fingerprint,
        "model_file": owner.name,
        "kv_dtype": owner.kv_dtype,
        "notes": state.notes,
    }
    metadata[CHECKSUM] = _checksum({name: _bytes(a) for name, a in arrays.items()}, metadata)
    with replacing(path) as temporary:
        try:
            save_file(arrays, temporary, metadata)
        except SafetensorError as error:  # wraps what the system said
            raise OSError(f"{path}: cannot be written: {error}") from error


def read(path: str | os.PathLike[str], owner: Owner) -> State:
    """Map a state and check that it is whole and belongs to `owner`. Its arrays are views into the file.

    Raises
    ------
    StateError
        The file is no saved session, is damaged, or belongs to another model or cache dtype.
    OSError
        The file cannot be opened.
    """
    metadata, shapes, arrays = _open(path)
    if metadata.get("model") != owner.fingerprint:
        raise StateError(
            f"{path}: was saved from another model, {metadata.get('model_file')!r} with fingerprint "
            f"{metadata.get('model')}; this is {owner.name!r} with fingerprint {owner.fingerprint}"
        )
    if metadata.get("kv_dtype") != owner.kv_dtype:
        raise StateError(
            f"{path}: was saved with kv_dtype {metadata.get('kv_dtype')!r}, this model has {owner.kv_dtype!r}"
        )
    dtype, shape = shapes.get(TOKENS, ("nothing", ()))
    expected = owner.tensors(shape[0] if shape else 0)
    if dtype != "I32" or len(shape) != 1 or shapes != {TOKENS: (dtype, shape), **expected}:
        raise StateError(f"{path}: its tensors are not those of a session of this model")
    tokens = arrays[TOKENS].view(_NUMPY_DTYPES["I32"])
    return State(tokens, [arrays[name] for name in expected], metadata.get("notes", ""))


Shapes: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]


def _open(path: str | os.PathLike[str]) -> tuple[dict[str, str], Shapes, dict[str, Bytes]]:
    """Map a file that must be a whole state; return metadata, dtypes with shapes, and bytes of tensors."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with safe_open(path, framework="numpy") as checked:
                metadata: dict[str, str] = checked.metadata() or {}
                slices = {name: checked.get_slice(name) for name in checked.offset_keys()}
                shapes = {name: (str(s.get_dtype()), tuple(s.get_shape())) for name, s in slices.items()}
        except SafetensorError as error:
            raise StateError(f"{path}: damaged, or not a saved session: {error}") from None
        data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    if metadata.get("format") != FORMAT:
        raise StateError(f"{path}: not a saved session: format {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise StateError(f"{path}: version {metadata.get('version')} of the format, only {VERSION} is read")

    # safe_open has checked that the tensors follow each other without a gap from the header to the end. The
    # arrays that it returns would be copies.
    arrays: dict[str, Bytes] = {}
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, (dtype, shape) in shapes.items():
        if dtype not in _NUMPY_DTYPES:
            raise StateError(f"{path}: damaged: tensor {name!r} has dtype {dtype}")
        end = begin + int(np.prod(shape, dtype=np.int64)) * _NUMPY_DTYPES[dtype].itemsize
        arrays[name] = data[begin:end]
        begin = end
    stated, actual = metadata.get(CHECKSUM), _checksum(arrays, metadata)
    if stated != actual:
        raise StateError(f"{path}: damaged: its checksum is {actual}, it should be {stated}")
    return metadata, shapes, arrays


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _checksum(arrays: Mapping[str, Bytes], metadata: Mapping[str, str]) -> str:
    stated = {key: value for key, value in metadata.items() if key != CHECKSUM}
    value = xxhash.xxh64_intdigest(json.dumps(stated, sort_keys=True).encode())
    for name in sorted(arrays):
        value = xxhash.xxh64_intdigest(name.encode(), value)
        value = xxhash.xxh64_intdigest(arrays[name].data, value)
    return f"{value:016x}"
