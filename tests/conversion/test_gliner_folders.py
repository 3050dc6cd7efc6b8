"""Folders of GLiNER: settings and tensors that are refused, and files that contradict themselves."""

from pathlib import Path

import pytest
from support.files.gguf_mutator import with_entries
from support.folders.entity_folders import RECORDED

from metal_prefill import GGUFError, Model
from metal_prefill.conversion import convert
from metal_prefill.files._metadata_keys import ENTITY_KEYS


def test_a_recurrence_that_the_library_does_not_apply_has_no_effect(tmp_path: Path) -> None:
    folder = RECORDED["modernbert and bert"](tmp_path / "m")
    assert "rnn.lstm.weight_hh_l0" in folder.tensors
    plain = convert(folder.write(), tmp_path / "plain.gguf").read_bytes()
    for name in [name for name in folder.tensors if name.startswith("rnn.")]:
        del folder.tensors[name]
    assert convert(folder.write(), tmp_path / "m.gguf").read_bytes() == plain


def test_the_encoder_may_have_a_configuration_of_its_own(tmp_path: Path) -> None:
    folder = RECORDED["bert"](tmp_path / "m")
    plain = convert(folder.write(), tmp_path / "plain.gguf").read_bytes()
    encoder = folder.config.pop("encoder_config")
    folder.write()
    folder.json("config.json", encoder)
    assert convert(folder.path, tmp_path / "m.gguf").read_bytes() == plain


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("mode", r"tensor entities\..* requires metal_prefill.entities.mode"),
        ("span_words", r"metadata .*entities\.span_words is missing"),
    ],
)
@pytest.mark.parametrize("name", ["bert", "modernbert and bert"])
def test_a_file_without_a_key_of_its_head_does_not_open(
    tmp_path: Path, name: str, key: str, message: str
) -> None:
    plain = convert(RECORDED[name](tmp_path / "m").write(), tmp_path / "plain.gguf")
    with pytest.raises(GGUFError, match=message):
        Model(with_entries(tmp_path / "m.gguf", plain, {f"{ENTITY_KEYS}{key}": None}), device="cpu")
