"""The GGUF reader: contents of valid files, and its errors."""

import mmap
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
from support.files.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
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

from metal_prefill import ClosedError, GGUFError, _core
from metal_prefill.files import GGUFFile
from metal_prefill.files._gguf_file import TENSOR_TYPES
from metal_prefill.files._gguf_writer import GGUFWriter

ALIGNMENT = "general.alignment"
# Numbers at the ends of integer types, and one that float types round.
NUMBERS = {
    U8: 255,
    U16: 65535,
    U32: 2**32 - 1,
    U64: 2**64 - 1,
    I8: -128,
    I16: -32768,
    I32: -(2**31),
    I64: -(2**63),
    F32: 0.1,
    F64: 0.1,
    BOOL: 1,
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    path = tmp_path / "model.gguf"

    def write(content: bytes) -> Path:
        path.write_bytes(content)
        return path

    return write


def rich_file() -> bytes:
    """Return a file with a value of every type and four tensors."""
    metadata = [
        entry("general.architecture", STRING, text("llama")),
        *(entry(f"scalar.{kind}", kind, scalar(kind, value)) for kind, value in NUMBERS.items()),
        *(
            entry(f"array.{kind}", ARRAY, array(kind, [scalar(kind, n % 2) for n in range(3)]))
            for kind in NUMBERS
        ),
        entry("strings", ARRAY, array(STRING, [text("one"), text(""), text("zwei ü")])),
        entry("nested", ARRAY, array(ARRAY, [array(U8, [b"\1", b"\2"]), array(STRING, [text("x")])])),
        entry("none", ARRAY, array(U32, [])),
        entry(ALIGNMENT, U32, scalar(U32, 64)),
    ]
    tensors = [
        tensor("vector", [5], 0, 0),
        tensor("matrix", [64, 2], 2, 128),
        tensor("before", [4], 1, 64),
        tensor("cube", [2, 3, 2], 0, 256),
    ]
    return gguf(metadata, tensors, bytes(range(256)) + bytes(48), alignment=64)


def test_types_and_lengths_are_known_without_decoding(write: Callable[[bytes], Path]) -> None:
    file = GGUFFile(write(rich_file()))
    assert file.metadata.type_name("general.architecture") == "string"
    assert file.metadata.type_name("strings") == "array[string]"
    assert file.metadata.length("strings") == 3
    assert file.metadata.length("strings") == len(file.metadata["strings"])  # type: ignore[arg-type]
    assert file.metadata.length("strings") == 3
    with pytest.raises(GGUFError, match=r"general\.architecture has type string, expected an array"):
        file.metadata.length("general.architecture")


def test_arrays_are_decoded_once_and_read_only(write: Callable[[bytes], Path]) -> None:
    file = GGUFFile(write(rich_file()))
    values = file.metadata[f"array.{F32}"]
    assert isinstance(values, np.ndarray)
    assert file.metadata[f"array.{F32}"] is values
    assert values.dtype == np.float32
    assert not values.flags.writeable
    assert values.flags.aligned


def test_nested_arrays_are_lists(write: Callable[[bytes], Path]) -> None:
    nested: Any = GGUFFile(write(rich_file())).metadata["nested"]
    assert [list(row) for row in nested] == [[1, 2], ["x"]]
    deepest = array(ARRAY, [array(ARRAY, [array(ARRAY, [array(U8, [b"\1"])])])])
    assert GGUFFile(write(gguf([entry("k", ARRAY, deepest)]))).metadata["k"] is not None


def test_tensors_are_views_of_the_mapping(write: Callable[[bytes], Path]) -> None:
    file = GGUFFile(write(rich_file()))
    assert (file.version, file.data_offset % 64) == (3, 0)
    assert list(file.tensors) == ["vector", "matrix", "before", "cube"]
    matrix = file.tensors["matrix"]
    assert (matrix.type, matrix.type_name, matrix.shape, matrix.nbytes) == (2, "Q4_0", (2, 64), 4 * 18)
    assert matrix.offset == file.data_offset + 128
    assert file.tensors["cube"].shape == (2, 3, 2)
    view = file.tensor("matrix")
    assert view.dtype == np.uint8
    assert view.tolist() == list(range(128, 128 + 72))
    assert np.shares_memory(view, file.mapping)
    assert not view.flags.writeable
    assert file.mapping.ctypes.data % os.sysconf("SC_PAGESIZE") == 0
    assert file.mapping.nbytes == file.path.stat().st_size
    with pytest.raises(GGUFError, match="no tensor nothing"):
        file.tensor("nothing")


def test_views_outlive_the_file(write: Callable[[bytes], Path]) -> None:
    with GGUFFile(write(rich_file())) as file:
        view, strings = file.tensor("matrix"), file.metadata["strings"]
    assert view[0] == 128
    assert file.metadata["strings"] is strings
    for use in (lambda: file.mapping, lambda: file.tensor("matrix"), lambda: file.metadata["nested"]):
        with pytest.raises(ClosedError, match="is closed"):
            use()
    file.close()


def test_tensor_types_match_the_gguf_package() -> None:
    ours = {number: tuple(kind) for number, kind in TENSOR_TYPES.items()}
    theirs = {int(t): (t.name, *sizes) for t, sizes in reference.GGML_QUANT_SIZES.items()}
    assert {number: ours.get(number) for number in theirs} == theirs


# Contents of valid files; None is the bundled model.
VALID = {
    "bundled": None,
    "every type": rich_file(),
    "nothing in it": gguf(),
    "version 2": gguf(version=2),
    "no tensors": gguf([entry("k", U8, b"\1")]),
    "key beyond ASCII": gguf([entry("ключ", U8, b"\1")]),
    "longest key": gguf([entry("k" * 65535, U8, b"\1")]),
    "longest tensor name": gguf([], [tensor("n" * 64)], bytes(128)),
    "four dimensions": gguf([], [tensor(dims=[1, 1, 1, 1])], bytes(4)),
    "offsets out of order": gguf([], [tensor("b", [32], 0, 128), tensor("a", [32], 0, 0)], bytes(256)),
    "gap between tensors": gguf([], [tensor("a", [1], 0, 0), tensor("b", [1], 0, 1024)], bytes(1028)),
    "smallest alignment": gguf(
        [entry(ALIGNMENT, U32, u32(8))], [tensor("a", [1]), tensor("b", [1], 0, 8)], bytes(12), alignment=8
    ),
    "large alignment": gguf([entry(ALIGNMENT, U32, u32(4096))], [tensor("a", [1])], bytes(4), alignment=4096),
    "bytes after the last tensor": gguf([], [tensor()], bytes(1000)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("content", VALID.values(), ids=VALID)
def test_a_valid_file_reads_as_with_the_gguf_package(
    write: Callable[[bytes], Path], demo_path: Path, content: bytes | None
) -> None:
    path = demo_path if content is None else write(content)
    file, theirs = GGUFFile(path), reference.GGUFReader(path)
    for key in file.metadata:
        value = file.metadata[key]
        listed = value.tolist() if isinstance(value, np.ndarray) else value
        assert listed == theirs.fields[key].contents() or key == "nested", key
    assert list(file.metadata) == [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(file.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = file.tensors[t.name]
        assert info.shape == tuple(int(n) for n in reversed(t.shape))
        assert (info.type, info.offset, info.nbytes) == (t.tensor_type, t.data_offset, t.n_bytes)
        assert np.array_equal(file.tensor(t.name), t.data.view(np.uint8).reshape(-1))


def test_missing_files_and_directories_raise_the_errors_of_open(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.gguf"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(IsADirectoryError):
        GGUFFile(tmp_path)


@pytest.mark.parametrize("mmap", [True, False])
def test_empty_files_devices_and_pipes_are_not_models(tmp_path: Path, mmap: bool) -> None:
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match=r"empty\.gguf: the file is empty"):
        GGUFFile(tmp_path / "empty.gguf", mmap=mmap)
    for path in (os.devnull, tmp_path / "pipe.gguf"):
        with pytest.raises(GGUFError, match="not a regular file"):
            GGUFFile(path, mmap=mmap)


def test_a_header_truncated_anywhere_is_an_error(write: Callable[[bytes], Path]) -> None:
    content = rich_file()
    for length in range(len(content)):
        with pytest.raises(GGUFError):
            GGUFFile(write(content[:length]))
    GGUFFile(write(content))


def test_string_inside_an_array_is_checked_on_access(write: Callable[[bytes], Path]) -> None:
    strings = array(STRING, [text("fine"), text(b"\xff")])
    file = GGUFFile(write(gguf([entry("k", ARRAY, strings), entry("other", ARRAY, array(U8, [b"\1"]))])))
    with pytest.raises(GGUFError, match=r"string 1 of k at byte \d+ is not valid UTF-8"):
        file.metadata["k"]
    assert file.metadata["other"] is not None


def test_long_arrays_cost_nothing_until_they_are_read(write: Callable[[bytes], Path]) -> None:
    tokens = array(STRING, [text(f"token {n}") for n in range(50_000)])
    path = write(gguf([entry("tokens", ARRAY, tokens)]))
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert file.metadata["tokens"][49_999] == "token 49999"  # type: ignore[index]


def test_pythons_mmap_maps_no_file(monkeypatch: pytest.MonkeyPatch, demo_path: Path) -> None:
    """On macOS it has the disk write its whole cache first."""

    def refuse(descriptor: int, *args: object, **kwargs: object) -> None:
        assert descriptor == -1, "a file"

    monkeypatch.setattr(mmap, "mmap", refuse)
    with GGUFFile(demo_path) as file:
        assert file.mapping.nbytes == demo_path.stat().st_size


def test_a_mapping_is_read_only_and_no_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"abc")
    with path.open("rb") as file:
        mapped = _core.map_file(file.fileno(), 3)
        assert mapped.tobytes() == b"abc"
        assert not mapped.flags.writeable
        with pytest.raises(ValueError, match="3 bytes, not 4"):
            _core.map_file(file.fileno(), 4)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _core.map_file(9999, 3)


def test_files_are_written_as_by_the_gguf_package(tmp_path: Path) -> None:
    texts = ["a", "", "\u00e9\u2581"]
    lists: list[Any] = [texts, [1, -2], [0.5, 1e30], [True, False], [b"a"], [[1], [2]], b"map", (1, 2)]
    for writer in (
        reference.GGUFWriter(tmp_path / "theirs", "llama"),
        GGUFWriter(tmp_path / "ours", "llama"),
    ):
        for values in lists:
            writer.add_array(str(values), values)
        writer.add_key_value("bytes", [1, 2], reference.GGUFValueType.ARRAY, reference.GGUFValueType.UINT8)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("values", [[1, "a"], [1 << 31], [1e39], []], ids=str)
def test_lists_that_no_file_can_hold_are_not_written(values: list[Any], tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_key_value("a", values, reference.GGUFValueType.ARRAY)
    writer.write_header_to_file()
    with pytest.raises((ValueError, OverflowError, struct.error)):
        writer.write_kv_data_to_file()
    writer.close()
