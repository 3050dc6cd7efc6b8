"""Saved sessions: a KV cache and the tokens it was computed from, in a safetensors file.

The file contains ``tokens`` (int32 ``[n]``) and, for each layer i, ``layer.i.key`` and ``layer.i.value``
(``[n, n_kv_heads, head_dim]`` in the cache's dtype). Its metadata identify the model:

=================  =============================================================================
``format``         ``metal_prefill.session``
``version``        version of this layout, ``1``
``model``          :func:`fingerprint` of the GGUF file
``model_file``     name of the GGUF file, for messages
``kv_dtype``       ``f16``, ``f32`` or ``q8_0``
``notes``          value of ``Session.notes``
``checksum``       XXH64 of all tensors and of the other metadata, 16 hexadecimal digits
=================  =============================================================================

Rows in ``q8_0`` are Q8_0 blocks in the layout of model files: 32 numbers in 17 words of two bytes. The first
word is the scale in f16, and each of the others contains two signed codes. The tensors have dtype F16 and
shape ``[n, n_kv_heads, head_dim / 32 * 17]``, which every reader of version 1 can parse; a reader without
support for ``q8_0`` rejects the file by its ``kv_dtype``.

Recurrent layers have ``layer.i.state``, instead of K and V or next to them, in float32: of a short
convolution ``[conv_taps - 1, dim]``, its inputs of the last tokens, oldest first; of other layers
``[values]``, the inputs of the convolution followed by the matrix of each head. In a model with such
layers, K and V cover the tokens before the position of the states, and the loaded session recomputes
the later tokens. A model without any K and V stores that position as ``computed`` (int32 ``[1]``).

The layout does not depend on the engine: a session saved on one device can continue on another.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import save_file

from metal_prefill import _core
from metal_prefill._core import ModelConfig
from metal_prefill._support.atomic_write import replacing
from metal_prefill.errors import MetalPrefillError, StateError
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.storage._cache_folder import sample_starts

FORMAT = "metal_prefill.session"
VERSION = "1"
CHECKSUM = "checksum"
TOKENS = "tokens"
CACHED = "computed"  # in files of models without K and V: number of tokens that the states cover


class _Rows(NamedTuple):
    """Storage of cache rows in a tensor: `words` elements of `dtype` for every `values` numbers."""

    dtype: str
    values: int = 1
    words: int = 1


_KV_DTYPES = {"f16": _Rows("F16"), "f32": _Rows("F32"), "q8_0": _Rows("F16", 32, 17)}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_SAMPLES, _SAMPLE_BYTES = 4, 1024  # per tensor, for the fingerprint

Bytes: TypeAlias = npt.NDArray[np.uint8]


def fingerprint(gguf: GGUFFile, variant: str = "") -> str:
    """Return a hash that identifies a model file, 32 hexadecimal digits.

    The hash covers the file size, the whole header (metadata, vocabulary, and names, shapes and types of
    tensors) and four samples of 1 KiB of every tensor, from its first byte to its last. It takes milliseconds
    regardless of the file size. Training, conversion and quantization change it; an edit of a few bytes
    inside a tensor may not. `variant` distinguishes models whose caches differ although they are
    read from the same file.
    """
    data = gguf.mapping.data
    digest = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    digest.update(data[: gguf.data_offset])
    for tensor in gguf.tensors.values():
        for start in sample_starts(tensor.nbytes, _SAMPLES, _SAMPLE_BYTES):
            begin = tensor.offset + start
            digest.update(data[begin : min(begin + _SAMPLE_BYTES, tensor.offset + tensor.nbytes)])
    digest.update(variant.encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Owner:
    """Identity of the model that a state belongs to."""

    config: ModelConfig
    kv_dtype: str  # ``f16``, ``f32`` or ``q8_0``
    fingerprint: str  # :func:`fingerprint` of the model file
    name: str  # name of the model file, for messages

    @property
    def recurrent(self) -> bool:
        """Whether a layer has a state."""
        return any(kind != "attention" for kind in self.config.layer_kinds)

    def tensors(self, n: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of K, V and states of `n` cached tokens, layer by layer."""
        c, rows = self.config, _KV_DTYPES[self.kv_dtype]
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for layer in range(c.n_layers):
            kind = c.kind(layer)
            own = c.of_layer(layer)
            for name, dim in (("key", own.key_dim), ("value", own.value_dim)) if c.caches(layer) else ():
                shape = (n, own.n_kv_heads, dim // rows.values * rows.words)
                tensors[f"layer.{layer}.{name}"] = (rows.dtype, shape)
            if kind == "short_conv":
                tensors[f"layer.{layer}.state"] = ("F32", (c.conv_taps - 1, c.dim))
            elif values := c.state_values(layer):
                tensors[f"layer.{layer}.state"] = ("F32", (values,))
        return tensors


class State(NamedTuple):
    """Contents of a session."""

    tokens: npt.NDArray[np.int32]  # ids of the session's tokens, int32 ``[n]``
    cached: int  # number of first tokens that K, V and states cover: all, unless a layer has a state
    # Bytes of K and V of each layer, in the canonical layout ``[n, n_kv_heads, head_dim]`` of numbers, or of
    # ``q8_0`` blocks; of a recurrent layer, of its state.
    rows: list[Bytes]
    notes: str = ""  # text supplied by the user


def save(session: _core.Session, path: str | os.PathLike[str], owner: Owner, notes: str = "") -> None:
    """Write the state of a session; on failure, leave an existing file untouched.

    An existing file is replaced atomically, once the new one is on disk. Raises OutputError if `path` is a
    device, a FIFO or a socket, OSError if the file cannot be written.
    """
    state = State(*session.export_state(), notes)
    arrays: dict[str, npt.NDArray[Any]] = {TOKENS: state.tokens}
    for (name, (dtype, shape)), raw in zip(owner.tensors(state.cached).items(), state.rows, strict=True):
        arrays[name] = raw.view(_NUMPY_DTYPES[dtype]).reshape(shape)
    if owner.config.n_heads == 0:
        arrays[CACHED] = np.array([state.cached], _NUMPY_DTYPES["I32"])
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "model": owner.fingerprint,
        "model_file": owner.name,
        "kv_dtype": owner.kv_dtype,
        "notes": state.notes,
    }
    raw_bytes = {name: array.reshape(-1).view(np.uint8) for name, array in arrays.items()}
    metadata[CHECKSUM] = _checksum(raw_bytes, metadata)
    with replacing(path) as temporary:
        try:
            save_file(arrays, temporary, metadata)
        except SafetensorError as error:  # wraps the system's error
            raise OSError(f"{path}: cannot be written: {error}") from error


def read(path: str | os.PathLike[str], owner: Owner) -> State:
    """Read a state and check that it is complete and belongs to `owner`.

    The file is read through one descriptor, so that a save that replaces it meanwhile has no effect.
    """
    path = os.fspath(path)  # `open` takes a number for a descriptor, and closes it
    # Without O_NONBLOCK, opening a FIFO for reading would wait for a writer.
    nonblocking = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | nonblocking)) as file:
        header = _read_header(path, file)
        _check_owner(path, header, owner)
        arrays = _read_arrays(path, file, header)
    tokens = arrays[TOKENS].view(_NUMPY_DTYPES["I32"])
    if CACHED in arrays:
        cached = int(arrays[CACHED].view(_NUMPY_DTYPES["I32"])[0])
        if not 0 <= cached <= len(tokens):
            raise StateError(f"{path}: damaged: it has states of {cached} tokens, and {len(tokens)} tokens")
    else:
        cached = _key_rows(header)
    rows = [arrays[name] for name in owner.tensors(cached)]
    return State(tokens, cached, rows, header.metadata.get("notes", ""))


def load(session: _core.Session, path: str | os.PathLike[str], owner: Owner) -> State:
    """Read a state into an empty session; see :func:`read`.

    Raises ContextOverflowError if the file has more tokens than the context of the session.
    """
    state = read(path, owner)
    try:
        session.import_state(state.tokens, state.cached, state.rows)
    except MetalPrefillError:
        raise
    except ValueError as error:
        raise StateError(f"{path}: {error}") from None
    return state


def _check_owner(path: str | os.PathLike[str], header: _Header, owner: Owner) -> None:
    metadata, tensors = header.metadata, header.tensors
    if metadata.get("model") != owner.fingerprint:
        raise StateError(
            f"{path}: was saved from another model, {metadata.get('model_file')!r} with fingerprint "
            f"{metadata.get('model')}; this is {owner.name!r} with fingerprint {owner.fingerprint}"
        )
    if metadata.get("kv_dtype") != owner.kv_dtype:
        raise StateError(
            f"{path}: was saved with kv_dtype={metadata.get('kv_dtype')!r}, this model has {owner.kv_dtype!r}"
        )
    dtype, shape = tensors.get(TOKENS, ("nothing", ()))
    n = shape[0] if shape else 0
    if owner.recurrent:
        n = min(n, _key_rows(header))
    expected = {TOKENS: (dtype, shape), **owner.tensors(n)}
    if owner.config.n_heads == 0:
        expected[CACHED] = ("I32", (1,))
    if dtype != "I32" or len(shape) != 1 or tensors != expected:
        raise StateError(f"{path}: its tensors do not match a session of this model")


def _key_rows(header: _Header) -> int:
    """Return the number of rows of K of the first layer that has them, or 0."""
    shape = next((shape for name, (_, shape) in header.tensors.items() if name.endswith(".key")), ())
    return shape[0] if shape else 0


class _Header(NamedTuple):
    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape, in the order of their bytes


def _read_header(path: str | os.PathLike[str], file: io.BufferedReader) -> _Header:
    """Read the header, and check that the tensors fill the rest of the file without gaps."""
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise StateError(f"{path}: not a saved session: it is not a regular file")
    try:
        length = int.from_bytes(file.read(8), "little")
        most = min(_MAX_HEADER_BYTES, max(status.st_size - 8, 0))
        if length > most:
            raise ValueError(f"the header has {length} bytes, more than {most}")
        header = json.loads(file.read(length).decode(), object_pairs_hook=_without_duplicates)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata is not text")
        tensors, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, offsets = (entry[key] for key in ("dtype", "shape", "data_offsets"))
            if dtype not in _NUMPY_DTYPES:
                raise ValueError(f"tensor {name!r} has dtype {dtype}")
            if not all(type(n) is int and n >= 0 for n in (*shape, *offsets)):
                raise ValueError(f"tensor {name!r} has sizes that are not nonnegative integers")
            begin, end = end, end + math.prod(shape) * _NUMPY_DTYPES[dtype].itemsize
            if offsets != [begin, end]:
                raise ValueError(f"tensor {name!r} is at {offsets}, not at [{begin}, {end}]")
            tensors[name] = (dtype, tuple(shape))
        if (size := 8 + length + end) != status.st_size:
            raise ValueError(f"the file has {status.st_size} bytes, its header requires {size}")
    # A malformed header can cause any of these; deep nesting causes RecursionError.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path}: damaged, or not a saved session: {error}") from None
    if metadata.get("format") != FORMAT:
        raise StateError(f"{path}: not a saved session: format {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise StateError(
            f"{path}: format version {metadata.get('version')} is not supported, must be {VERSION}"
        )
    return _Header(metadata, tensors)


def _read_arrays(path: str | os.PathLike[str], file: io.BufferedReader, header: _Header) -> dict[str, Bytes]:
    """Read the bytes of the tensors after the header, and verify the checksum."""
    arrays: dict[str, Bytes] = {}
    for name, (dtype, shape) in header.tensors.items():
        array = np.empty(math.prod(shape) * _NUMPY_DTYPES[dtype].itemsize, np.uint8)
        if file.readinto(array.data) < array.size:
            raise StateError(f"{path}: damaged: the file ends at {file.tell()} bytes")
        arrays[name] = array
    stated, actual = header.metadata.get(CHECKSUM), _checksum(arrays, header.metadata)
    if stated != actual:
        raise StateError(f"{path}: damaged: its checksum is {actual}, expected {stated}")
    return arrays


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("the header contains a duplicate name")
    return entries


def _checksum(arrays: Mapping[str, Bytes], metadata: Mapping[str, str]) -> str:
    stated = {key: value for key, value in metadata.items() if key != CHECKSUM}
    value = xxhash.xxh64_intdigest(json.dumps(stated, sort_keys=True).encode())
    for name in sorted(arrays):
        value = xxhash.xxh64_intdigest(name.encode(), value)
        value = xxhash.xxh64_intdigest(arrays[name].data, value)
    return f"{value:016x}"
