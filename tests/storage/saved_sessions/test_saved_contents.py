"""Saved sessions contain what the session had, and belong to one model."""

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from support.files.saved_sessions import PROMPT, rewrite
from support.places import DATA
from support.small_models import MODELS, write

from metal_prefill import ContextOverflowError, Model, StateError, _core
from metal_prefill.files import GGUFFile
from metal_prefill.storage import _session_file
from metal_prefill.synth import synthesize

ROMEO = [0, 814, 26, 199, 450, 366, 70, 84]  # "ROMEO:\nBut soft"


def test_a_loaded_prefix_is_reused(demo: Model, saved: Path) -> None:
    with demo.load_session(saved) as session:
        session.forward_prompt([*PROMPT, 1, 2, 3], reuse=True)
        assert session.stats()["tokens_reused"] == len(PROMPT)


def test_saving_what_was_loaded_writes_the_same_state(demo: Model, saved: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.session"
    demo.load_session(saved).save(again)
    first, second = load_file(saved), load_file(again)
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    with safe_open(saved, framework="numpy") as a, safe_open(again, framework="numpy") as b:
        assert a.metadata() == b.metadata()


def test_notes_are_restored_with_the_session(demo: Model, tmp_path: Path) -> None:
    with demo.session() as session:
        session.notes = 'anything "at all"\n漢字'
        session.save(tmp_path / "s.session")
    assert demo.load_session(tmp_path / "s.session").notes == session.notes
    assert demo.session().notes == ""


@pytest.mark.parametrize("head_dim", [20, 36, 64, 80])
def test_every_shape_of_cache_survives(device: str, tmp_path: Path, head_dim: int) -> None:
    """Heads are not a multiple of any vector, and prompts end inside a block of any size."""
    for kv_dtype in ["f16", "f32"]:
        synthesize(tmp_path / "m.gguf", preset="tiny", heads=8, kv_heads=1, head_dim=head_dim)
        with Model(tmp_path / "m.gguf", device=device, kv_dtype=kv_dtype) as model:
            for n in (1, 7, 16, 35):
                with model.session() as session:
                    session.forward_prompt(PROMPT[:n])
                    session.save(tmp_path / "s.session")
                    with model.load_session(tmp_path / "s.session") as loaded:
                        np.testing.assert_array_equal(loaded.forward_token(5), session.forward_token(5))


def bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Round to 8 significant bits, to the nearest even, in float32."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32)
    return np.where(np.isnan(values), values.astype(np.float32), rounded)


@pytest.mark.parametrize("device", [*_core.kernel_sets(), "metal"])
def test_every_value_of_a_cache_survives(
    request: pytest.FixtureRequest,
    demo_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
) -> None:
    """Keys and values are all f16 values, including subnormal ones, infinities and NaN.

    A cache of bfloat16 rounds them once, and the largest ones return as the largest f16.
    """
    path = tmp_path / "s.session"
    if device == "metal":
        request.getfixturevalue("metal")
    else:
        monkeypatch.setenv("METAL_PREFILL_CPU_ISA", device)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    rounded = np.clip(bfloat16(halves), -65504, 65504)
    expected = np.where(np.isinf(halves), halves, rounded).astype(np.float16)
    with Model(demo_path, device="metal" if device == "metal" else "cpu", threads=1) as model:
        for n in (79, 80):
            with model.session() as session:
                session.forward_prompt((PROMPT * 2)[:n])
                session.save(path)
            names = {name: array.shape for name, array in load_file(path).items() if name != "tokens"}
            starts = np.arange(len(names)) * (1 << 16) // len(names)
            arrays = {
                name: np.roll(halves, -start)[: np.prod(shape)].reshape(shape)
                for start, (name, shape) in zip(starts, names.items(), strict=True)
            }
            patterns = np.concatenate([array.reshape(-1).view(np.uint16) for array in arrays.values()])
            assert np.unique(patterns).size == 1 << 16
            rewrite(path, arrays=arrays)
            with model.load_session(path) as session:
                session.save(path)
            loaded = load_file(path)
            found = np.concatenate([loaded[name].reshape(-1) for name in arrays])
            matches = [
                np.array_equal(found, values[patterns], equal_nan=True)
                and np.array_equal(np.signbit(found), np.signbit(values[patterns]))
                for values in (halves, expected)
            ]
            assert any(matches)


def test_the_file_is_plain_safetensors_in_canonical_layout(demo: Model, saved: Path) -> None:
    arrays, c = load_file(saved), demo.config
    assert arrays["tokens"].tolist() == PROMPT
    assert set(arrays) == {
        "tokens",
        *(f"layer.{i}.{kind}" for i in range(c.n_layers) for kind in ("key", "value")),
    }
    for i in range(c.n_layers):
        for kind, dim in (("key", c.key_dim), ("value", c.value_dim)):
            array = arrays[f"layer.{i}.{kind}"]
            assert array.shape == (len(PROMPT), c.n_kv_heads, dim)
            assert array.dtype == np.float16
            assert np.isfinite(array).all()
            assert array.any(axis=-1).all(), "a row was never written"


def test_another_model_is_rejected(demo: Model, device: str, saved: Path, tmp_path: Path) -> None:
    """The other model differs in a single weight."""
    other = tmp_path / "other.gguf"
    shutil.copy(demo.path, other)
    norm = demo.gguf.tensors["output_norm.weight"]
    with open(other, "r+b") as file:
        file.seek(norm.offset + norm.nbytes - 4)
        file.write(struct.pack("<f", 1.5))
    with Model(other, device=device) as model:
        with pytest.raises(StateError, match=rf"another model, '{demo.path.name}'.*'other.gguf'"):
            model.load_session(saved)
        assert model.position == 0


def test_the_same_model_at_another_path_is_accepted(
    demo: Model, device: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copy(demo.path, tmp_path / "copy.gguf")
    with Model(tmp_path / "copy.gguf", device=device) as model:
        assert model.load_session(saved).tokens == PROMPT


def test_fingerprint_covers_header_and_every_tensor(demo_path: Path, tmp_path: Path) -> None:
    file, whole = GGUFFile(demo_path), demo_path.read_bytes()
    seen = {_session_file.fingerprint(file)}
    places = [
        whole.index(b"general.name") + 12 + 4 + 8,  # after key, type and length: a letter
        *(t.offset for t in file.tensors.values()),
        *(t.offset + t.nbytes - 1 for t in file.tensors.values()),
    ]
    copy = tmp_path / "changed.gguf"
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1
        copy.write_bytes(content)
        seen.add(_session_file.fingerprint(GGUFFile(copy)))
    assert len(seen) == 1 + len(places)


def test_a_state_requires_the_same_long_rope_factors(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MODELS["phi3, long rope"])
    with Model(path, device=device, max_context=64) as short:
        session = short.session()
        session.forward_prompt(np.arange(9))
        session.save(tmp_path / "state")
    with (
        Model(path, device=device) as model,
        pytest.raises(StateError, match=r"another model, 'm\.gguf' .* 'm\.gguf for long contexts'"),
    ):
        model.load_session(tmp_path / "state")


def test_another_cache_dtype_is_rejected(device: str, demo_path: Path, saved: Path) -> None:
    with (
        Model(demo_path, device=device, kv_dtype="f32") as model,
        pytest.raises(StateError, match="kv_dtype='f16', this model has 'f32'"),
    ):
        model.load_session(saved)


def test_a_context_that_is_too_small_is_rejected(demo: Model, saved: Path) -> None:
    with pytest.raises(ContextOverflowError, match="70 tokens exceeds the context of 69"):
        demo.load_session(saved, max_context=69)
    with demo.load_session(saved, max_context=70) as session:
        assert session.position == session.max_context == 70
    with pytest.raises(ValueError, match="context length"):
        demo.load_session(saved, max_context=demo.config.context_length + 1)


def test_wrong_arrays_never_reach_the_cache(demo: Model) -> None:
    """The native import checks its arguments itself."""
    session = demo.session()
    session.forward_prompt(PROMPT)
    tokens, cached, rows = session.native.export_state()
    core = demo.session().native
    with pytest.raises(ValueError, match="arrays, got"):
        core.import_state(tokens, cached, rows[:-1])
    with pytest.raises(ValueError, match=r"values of layer 1 have \d+ bytes, expected"):
        core.import_state(tokens, cached, [*rows[:3], rows[3][:-1], *rows[4:]])
    assert core.position == 0
    core.import_state(tokens, cached, rows)
    assert core.tokens() == PROMPT


def test_a_stored_file_of_version_1_loads(demo: Model) -> None:
    """The file contains the tokens of ROMEO and a note; its layout and checksum are stable."""
    loaded = demo.load_session(DATA / "version_1.session")
    assert loaded.tokens == ROMEO
    assert loaded.notes == "the balcony \u2014 kept"
    with demo.session() as session:
        following = session.forward_prompt(ROMEO)
        assert loaded.forward_token_greedy(following) == session.forward_token_greedy(following)
