"""Folders of GLiNER: settings and tensors that are refused, and files that contradict themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.entity_folders import BODY, LABELS_BODY, RECORDED, EntityFolder
from support.gguf_mutator import take_apart

from metal_prefill import GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.files._metadata_keys import ENTITY_KEYS

Change = Callable[[EntityFolder], object]


def _settings(**fields: Any) -> Change:
    return lambda folder: folder.config.update(fields)


def _encoder(**fields: Any) -> Change:
    return lambda folder: folder.config["encoder_config"].update(fields)


def _without(name: str) -> Change:
    return lambda folder: folder.tensors.pop(name)


def _with(name: str, *shape: int) -> Change:
    return lambda folder: folder.tensors.update({name: np.ones(shape, np.float32)})


REFUSED: list[tuple[Change, str]] = [
    (_settings(labels_decoder="a/b"), "labels_decoder is 'a/b'"),
    (_settings(relations_layer="biaffine"), "relations_layer is 'biaffine'"),
    (_settings(span_mode="markerV1"), "span_mode is 'markerV1'; supported: 'markerV0', 'token_level'"),
    (_settings(words_splitter_type="stanza"), "words_splitter_type is 'stanza'; supported: 'whitespace'"),
    (_settings(fuse_layers=True), "fuse_layers is True"),
    (_settings(post_fusion_schema="l2l-l2t"), "post_fusion_schema is 'l2l-l2t'"),
    (_settings(num_rnn_layers=2), "num_rnn_layers is 2"),
    (_settings(num_rnn_layers=0), r"tensor rnn\.lstm\.\w+ is not part of"),
    (_settings(class_token_index=7), "class_token_index is 7, but the token <<ENT>> is 1518"),
    (_settings(encoder_config=None), r"encoder_config is missing: name a folder with config.json"),
    (_settings(max_width=0), "max_width is 0, must be between 1"),
    (_encoder(model_type="llama"), "encoder_config.model_type is 'llama'; supported: albert, bert"),
    (_encoder(hidden_act="swish"), "hidden_act is 'swish'"),
    (_without("rnn.lstm.bias_hh_l0"), "num_rnn_layers is 1, but the weights lack"),
    (_without("prompt_rep_layer.3.bias"), "tensor entities.label.1.bias is missing"),
    (_without(f"{BODY}embeddings.word_embeddings.weight"), "the weights lack the embedding of tokens"),
    (_with("prompt_rep_layer.3.bias", 7), r"entities.label.1.bias has shape \(7,\) .*, expected \(32,\)"),
    (_with("prompt_rep_layer.4.bias", 7), r"tensor prompt_rep_layer\.4\.bias is not part of"),
    (_with("rnn.lstm.weight_ih_l1", 128, 32), r"tensor rnn\.lstm\.weight_ih_l1 is not part of"),
]


OF_LABELS: list[tuple[Change, str]] = [
    (
        _settings(labels_encoder_config=None, labels_encoder="a/b"),
        "labels_encoder_config is missing: .* of a/b as encoders.'labels'",
    ),
    (_settings(labels_encoder=None), r"tensor token_rep_layer\.labels_encoder\.\S+ is not part of"),
    (_settings(labels_decoder="a/b"), "labels_decoder is 'a/b'"),
    (
        lambda folder: folder.config["labels_encoder_config"].update(hidden_act="swish"),
        "hidden_act is 'swish'",
    ),
    (_without("token_rep_layer.labels_projection.weight"), r"dense_2\.bias requires dense_2\.weight"),
    (_with("token_rep_layer.labels_projection.weight", 8, 64), r"dense_2\.bias has shape \(32,\)"),
    (_without(f"{LABELS_BODY}embeddings.word_embeddings.weight"), "lack the embedding .*labels_encoder"),
    (_without(f"{LABELS_BODY}encoder.layer.0.output.dense.bias"), r"ffn_down\.bias is missing"),
    (lambda folder: _drop_projection(folder), "vectors of labels have 64 values, and those of words 32"),
]


def _drop_projection(folder: EntityFolder) -> None:
    for end in ("weight", "bias"):
        del folder.tensors[f"token_rep_layer.labels_projection.{end}"]


@pytest.mark.parametrize(("change", "message"), OF_LABELS)
def test_an_encoder_of_labels_that_does_not_open_is_refused_by_name(
    tmp_path: Path, change: Change, message: str
) -> None:
    folder = RECORDED["modernbert and bert"](tmp_path / "m")
    change(folder)
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        convert(folder.write(), tmp_path / "m.gguf")


def test_a_recurrence_that_the_library_does_not_apply_has_no_effect(tmp_path: Path) -> None:
    folder = RECORDED["modernbert and bert"](tmp_path / "m")
    assert "rnn.lstm.weight_hh_l0" in folder.tensors
    plain = convert(folder.write(), tmp_path / "plain.gguf").read_bytes()
    for name in [name for name in folder.tensors if name.startswith("rnn.")]:
        del folder.tensors[name]
    assert convert(folder.write(), tmp_path / "m.gguf").read_bytes() == plain


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_folder_that_does_not_open_is_refused_by_name(tmp_path: Path, change: Change, message: str) -> None:
    folder = RECORDED["bert"](tmp_path / "m")
    change(folder)
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        convert(folder.write(), tmp_path / "m.gguf")


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
        ("span_words", r"entities\.span_words is None, must be an integer"),
    ],
)
@pytest.mark.parametrize("name", ["bert", "modernbert and bert"])
def test_a_file_without_a_key_of_its_head_does_not_open(
    tmp_path: Path, name: str, key: str, message: str
) -> None:
    plain = convert(RECORDED[name](tmp_path / "m").write(), tmp_path / "plain.gguf")
    parts = take_apart(plain)
    parts.metadata = [item for item in parts.metadata if item[0] != f"{ENTITY_KEYS}{key}".encode()]
    with pytest.raises(GGUFError, match=message):
        Model(parts.write(tmp_path / "m.gguf"), device="cpu")
