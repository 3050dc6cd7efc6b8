"""Saving replaces a file completely or not at all, and files that are not complete are rejected."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.files.saved_sessions import PROMPT, rewrite
from support.small_models import MODELS, write

from metal_prefill import Model, StateError
from metal_prefill.storage import _session_file


def fail(*_: object, **__: object) -> None:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("step", ["save_file", "os.fsync", "os.replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    demo: Model, saved: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr(f"metal_prefill.storage._session_file.{step}", fail)
    with demo.session() as session:
        session.forward_prompt(PROMPT[:5])
        with pytest.raises(OSError, match="the disk is gone"):
            session.save(saved)
        assert session.position == 5
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("step", ["_read_header", "_check_owner"])
def test_a_save_does_not_affect_a_concurrent_load(
    demo: Model, saved: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    original = getattr(_session_file, step)

    def save_first(*arguments: object) -> object:
        with demo.session() as other:
            other.forward_prompt([7, 8, 9])
            other.save(saved)
        return original(*arguments)

    monkeypatch.setattr(_session_file, step, save_first)
    assert demo.load_session(saved).tokens == PROMPT
    monkeypatch.undo()
    assert demo.load_session(saved).tokens == [7, 8, 9]


def test_saving_over_a_loaded_state_does_not_disturb_the_session(demo: Model, saved: Path) -> None:
    with demo.load_session(saved) as session, demo.session() as other:
        other.forward_prompt(PROMPT[:3])
        other.save(saved)
        session.save(saved)
    assert demo.load_session(saved).tokens == PROMPT


def test_saving_through_a_link_keeps_the_link(demo: Model, saved: Path) -> None:
    link = saved.with_name("link")
    link.symlink_to(saved)
    with demo.session() as session:
        session.save(link)
    assert link.is_symlink()
    assert demo.load_session(saved).position == 0


@pytest.fixture
def device() -> str:
    """Files are read in the same way for every device."""
    return "cpu"


def test_a_file_of_another_length_is_rejected(demo: Model, saved: Path) -> None:
    content = saved.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    lengths = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(content) - 1, *range(0, len(content), 4099)}
    for damaged in (content + b"\0", *(content[:length] for length in sorted(lengths))):
        saved.write_bytes(damaged)
        with pytest.raises(StateError, match="damaged"):
            demo.load_session(saved)


@pytest.mark.parametrize("computed", [-1, 71])
def test_states_of_a_number_of_tokens_beyond_the_prompt_are_rejected(tmp_path: Path, computed: int) -> None:
    path = tmp_path / "states.session"
    with Model(write(tmp_path / "m.gguf", MODELS["mamba2"]), device="cpu") as model:
        with model.session() as session:
            session.forward_prompt(np.arange(70))
            session.save(path)
        rewrite(path, arrays={"computed": np.array([computed], np.int32)})
        with pytest.raises(StateError, match=f"states of {computed} tokens, and 70"):
            model.load_session(path)


def test_a_flipped_bit_anywhere_is_rejected(demo: Model, saved: Path) -> None:
    content = saved.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    rng = np.random.default_rng(3)
    in_header = rng.choice(header, 300, replace=False)
    in_data = header + rng.choice(len(content) - header, 100, replace=False)
    for place in (*in_header, *in_data, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        saved.write_bytes(damaged)
        with pytest.raises(StateError):
            demo.load_session(saved)


def test_other_safetensors_files_are_rejected(demo: Model, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": np.zeros((2, 3), np.float32)}, path)
    with pytest.raises(StateError, match="not a saved session"):
        demo.load_session(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"version": "2"}}, "format version 2 is not supported"),
        ({"metadata": {"format": "somebody.else"}}, "'somebody.else'"),
        ({"metadata": {"kv_dtype": "q8_0"}}, "kv_dtype='q8_0'"),
        ({"arrays": {"tokens": None}}, "tensors do not match"),
        ({"arrays": {"tokens": np.array(3, np.int32)}}, "tensors do not match"),
        ({"arrays": {"tokens": np.arange(69, dtype=np.int32)}}, "tensors do not match"),
        ({"arrays": {"tokens": np.arange(70, dtype=np.float32)}}, "tensors do not match"),
        ({"arrays": {"tokens": np.arange(70, dtype=np.int64)}}, "dtype I64"),
        ({"arrays": {"layer.1.value": None}}, "tensors do not match"),
        ({"arrays": {"layer.99.key": np.zeros((70, 3, 32), np.float16)}}, "tensors do not match"),
        ({"arrays": {"layer.0.key": np.zeros((70, 3, 16), np.float16)}}, "tensors do not match"),
        ({"arrays": {"tokens": np.full(70, 99999, np.int32)}}, "99999 at index 0"),
        ({"arrays": {"tokens": np.full(70, -1, np.int32)}}, "-1 at index 0"),
    ],
)
def test_a_complete_file_with_wrong_contents_is_rejected(
    demo: Model, saved: Path, change: dict[str, Any], message: str
) -> None:
    rewrite(saved)
    assert demo.load_session(saved).tokens == PROMPT
    rewrite(saved, **change)
    with pytest.raises(StateError, match=message):
        demo.load_session(saved)


def test_missing_files_and_directories_are_os_errors(demo: Model, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        demo.load_session(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        demo.load_session(tmp_path)
    with pytest.raises(FileNotFoundError), demo.session() as session:
        session.save(tmp_path / "absent" / "x.session")
    assert list(tmp_path.iterdir()) == []


def test_a_fifo_is_rejected_without_waiting_for_a_writer(demo: Model, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(StateError, match="not a regular file"):
        demo.load_session(path)


def header_of(dtype: str = '"F16"', shape: str = "[1]", offsets: str = "[0, 2]") -> bytes:
    return f'{{"a": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}}}'.encode()


def test_malformed_headers_are_rejected(demo: Model, tmp_path: Path) -> None:
    for header, message in [
        (b"[" * 100_000, "damaged"),
        (b'{"a": 1}', "damaged"),
        (b'{"__metadata__": {"format": 1}}', "metadata is not text"),
        (b'{"__metadata__": []}', "damaged"),
        (header_of(dtype='["F16"]'), "damaged"),
        (header_of(shape="[true]"), "sizes that are not nonnegative integers"),
        (header_of(shape="[-1, -1]"), "sizes that are not nonnegative integers"),
        (header_of(shape="[2]"), r"is at \[0, 2\], not at \[0, 4\]"),
        (header_of(dtype='"F64"', offsets="[0, 8]"), "dtype F64"),
        (header_of().replace(b"data_offsets", b"x"), "damaged"),
        (header_of(shape="[9]", offsets="[0, 18]"), "bytes, its header requires"),
        (b'{"__metadata__": {}, "__metadata__": {}}', "duplicate name"),
        (b'{"__metadata__": {"format": "\xff"}}', "damaged"),
    ]:
        path = tmp_path / "malformed"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
        with pytest.raises(StateError, match=message):
            demo.load_session(path)


def test_a_state_truncated_while_it_is_read_is_reported_as_damaged(
    demo: Model, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = _session_file._check_owner

    def truncate_first(*arguments: Any) -> None:
        original(*arguments)
        os.truncate(saved, saved.stat().st_size // 2)

    monkeypatch.setattr(_session_file, "_check_owner", truncate_first)
    with pytest.raises(StateError, match=r"damaged: the file ends at \d+ bytes"):
        demo.load_session(saved)
