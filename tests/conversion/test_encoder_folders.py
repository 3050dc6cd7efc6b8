"""States of encoders with random weights next to those of transformers and to float64 arithmetic."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.closeness import assert_close, hidden_states, lowest_cosine, states_of_texts
from support.encoder_tasks import FileOf, opened
from support.files.gguf_bytes import TRUE
from support.files.gguf_mutator import with_entries
from support.folders import bidirectional_folders
from support.folders.encoder_folders import (
    CONTEXT,
    MASKED,
    PRIVACY_FILTERS,
    RECORD,
    RECORDED,
    TEXTS,
    masked,
    rows_of,
    texts,
)
from support.folders.model_folders import assert_same_tensors, llama, read
from support.folders.other_encoders import NOMIC_MOE, jina_code, jina_code_states, nomic_moe_states
from support.small_models import with_tensor

from metal_prefill import GGUFError, Model
from metal_prefill.conversion import convert
from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._source import find_source
from metal_prefill.conversion._writing import SOURCES
from metal_prefill.sentence_transformers import SentenceTransformer

# Between the router's products for the last expert of a token and the next one. Products have errors of a few
# thousandths on Metal, so that a token with a smaller margin may have another expert.
LEAST_MARGIN = 0.02


def _decided(margins: Any, *rows: Any) -> list[Any]:
    """Return the rows of tokens whose experts are certain: most."""
    certain = margins >= LEAST_MARGIN
    assert certain.mean() > 0.5
    return [array[certain] for array in rows]


@pytest.mark.parametrize("name", RECORDED)
def test_states_are_those_of_transformers(device: str, file_of: FileOf, name: str) -> None:
    with opened(file_of(RECORDED[name]), device) as model, np.load(RECORD) as record:
        for ids in texts():
            expected = record[f"{name}/{len(ids)}"]
            found = rows_of(hidden_states(model, ids))
            if device == "metal" and name in PRIVACY_FILTERS:
                found, expected = _decided(record[f"{name}/{len(ids)}/margins"], found, expected)
            assert_close(device, found, expected)
            assert lowest_cosine(found, expected) >= 0.99999


@pytest.mark.parametrize("name", NOMIC_MOE)
def test_states_of_experts_without_gates_are_those_in_float64(device: str, tmp_path: Path, name: str) -> None:
    folder = NOMIC_MOE[name](tmp_path / "m")
    with opened(convert(folder.write(), tmp_path / "m.gguf"), device) as model:
        for ids in texts():
            expected, margins = nomic_moe_states(folder.config, folder.tensors, ids)
            found = hidden_states(model, ids)
            if device == "metal":
                found, expected = _decided(margins, found, expected)
            assert_close(device, found, expected)


@pytest.mark.parametrize("name", MASKED)
def test_vectors_over_the_vocabulary_are_those_of_transformers(
    device: str, tmp_path: Path, name: str
) -> None:
    with opened(masked(tmp_path / "m", name).write(), device) as model, np.load(RECORD) as record:
        for found, expected in zip(model.embed_sparse(TEXTS), record[f"{name}, masked"], strict=True):
            assert (np.diff(found.ids) > 0).all()
            assert (found.weights > 0).all()
            vector = np.zeros_like(expected)
            vector[found.ids] = found.weights
            assert np.abs(vector - expected).max() <= {"cpu": 1e-5, "metal": 2e-3}[device] * expected.max()


@pytest.mark.parametrize("compute", ["f32", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        *("albert, odd", "t5, gated", "deberta", "jina v3, odd"),
        *("privacy filter, odd", "privacy filter, many experts", "nomic moe, odd"),
    ],
)
def test_a_text_has_the_same_bits_in_any_batch(file_of: FileOf, name: str, compute: str) -> None:
    path = file_of((RECORDED | NOMIC_MOE)[name], "auto" if compute == "f32" else "Q8_0")
    ids = [np.random.default_rng(n).integers(5, 300, n) for n in (1, 40, 9, 300, 65)]
    with Model(path, device="cpu", compute=compute, threads=2) as model:
        together = states_of_texts(model, ids)
        for text, states in zip(ids, together, strict=True):
            np.testing.assert_array_equal(hidden_states(model, text), states)


def test_embeddings_that_the_configuration_excludes_have_no_effect(tmp_path: Path) -> None:
    folder = RECORDED["deberta"](tmp_path / "m")
    plain = convert(folder.write(), tmp_path / "plain.gguf").read_bytes()
    for table in ("position", "token_type"):
        folder.tensors[f"embeddings.{table}_embeddings.weight"] = np.ones((CONTEXT, 32), np.float32)
    assert convert(folder.write(), tmp_path / "m.gguf").read_bytes() == plain


@pytest.mark.parametrize("row", [-1.0, 32.0, np.nan])
def test_a_distance_without_a_row_is_refused(
    device: str, file_of: FileOf, tmp_path: Path, row: float
) -> None:
    plain = file_of(RECORDED["deberta"])
    path = with_tensor(tmp_path / "m.gguf", plain, "attn_rel_row.weight", lambda rows: rows.put(7, row))
    with pytest.raises(GGUFError, match=r"attn_rel_row.weight' has the row .*, must be at least 0 and below"):
        Model(path, device=device)


def test_states_of_jinas_bert_for_code_match_float64(device: str, tmp_path: Path) -> None:
    folder = jina_code(tmp_path / "folder")
    with opened(convert(folder.write(), tmp_path / "m.gguf"), device) as model:
        for tokens in (1, 9, 40):
            ids = np.random.default_rng(tokens).integers(5, 300, tokens)
            assert_close(device, hidden_states(model, ids), jina_code_states(folder, ids))


def test_gte_has_another_class_in_the_repositories_of_alibaba(tmp_path: Path) -> None:
    fields, expected = read(convert(RECORDED["gte, longer"](tmp_path / "m").write(), tmp_path / "m.gguf"))
    folder = RECORDED["gte"](tmp_path / "new")
    folder.config |= {
        "architectures": ["NewModel"],
        "rope_theta": folder.config.pop("rope_parameters")["rope_theta"],
        "rope_scaling": {"type": "ntk", "factor": 8.0},
        "layer_norm_type": "layer_norm",
        "position_embedding_type": "rope",
    }
    folder.tensors = {f"new.{name}": tensor for name, tensor in folder.tensors.items()}
    found, tensors = read(convert(folder.write(), tmp_path / "new.gguf"))
    rope = {key: value for key, value in fields.items() if key.startswith("gte.rope.")}
    assert {key: found.get(key) for key in rope} == {
        key: value if isinstance(value, str) else pytest.approx(value) for key, value in rope.items()
    }
    assert_same_tensors(tensors, expected)


def test_pairs_of_mpnet_have_two_separators(tmp_path: Path) -> None:
    folder = RECORDED["mpnet"](tmp_path / "folder")
    ids = folder.loaded("tokenizer.json")["model"]["vocab"]
    frame = {"sep": ["[SEP]", ids["[SEP]"]], "cls": ["[CLS]", ids["[CLS]"]]}
    flags = dict.fromkeys(("trim_offsets", "add_prefix_space"), True)
    folder.merge("tokenizer.json", post_processor={"type": "RobertaProcessing", **frame, **flags})
    with Model(folder.write()) as model:
        first, second = (model.tokenizer.encode(text, add_bos=False) for text in ("a rose", "by any name"))
        begin, end = model.tokenizer.bos_id, model.tokenizer.eos_id
        assert model.tokenizer.frame.pair(first, second).ids == [
            *(begin, *first, end),
            *(end, *second, end),
        ]


INTEGERS = "qwen3, integers"


def vectors(path: Path, device: str = "cpu", **options: Any) -> Any:
    with opened(path, device) as model:
        assert not model.engine.config.causal
        return model.embed(bidirectional_folders.TEXTS, **options)


@pytest.mark.parametrize("name", [name for name in bidirectional_folders.RECORDED if name != INTEGERS])
def test_vectors_are_those_of_transformers(device: str, file_of: FileOf, name: str) -> None:
    path = file_of(bidirectional_folders.RECORDED[name])
    with np.load(bidirectional_folders.RECORD) as record:
        expected = record[name]
    found = vectors(path, device)
    assert found.shape == expected.shape
    assert (found * expected).sum(axis=1).min() >= {"cpu": 0.999999, "metal": 0.9999}[device]


def test_vectors_of_pplx_embed_are_rounded_tangents(device: str, file_of: FileOf) -> None:
    path = file_of(bidirectional_folders.RECORDED[INTEGERS])
    with np.load(bidirectional_folders.RECORD) as record:
        means = record[INTEGERS].astype(np.float64)
    found = vectors(path, device, normalize=False)
    exact = 127 * np.tanh(means)
    # Half a step from rounding, and the engine's error.
    assert np.abs(found - exact).max() <= 0.5 + {"cpu": 1e-3, "metal": 0.5}[device]
    np.testing.assert_array_equal(found, np.rint(found))
    assert np.abs(found).max() > 50
    if device == "cpu":
        clear = np.abs(exact - np.rint(exact)) < 0.49  # of those next to a half, either neighbour is right
        np.testing.assert_array_equal(found[clear], np.rint(exact)[clear])
        model = SentenceTransformer(path, model_kwargs={"dtype": "float32"})
        np.testing.assert_array_equal(model.encode(bidirectional_folders.TEXTS), found)


def test_the_pooling_may_be_that_of_the_configuration(tmp_path: Path) -> None:
    folder = bidirectional_folders.RECORDED["llama"](tmp_path / "m")
    whole = vectors(convert(folder.write(), tmp_path / "m.gguf"))
    (folder.path / "modules.json").unlink()
    np.testing.assert_array_equal(vectors(convert(folder.path, tmp_path / "n.gguf"), normalize=True), whole)


def test_a_file_of_a_decoder_may_state_that_its_attention_is_not_causal(
    file_of: FileOf, tmp_path: Path
) -> None:
    path = file_of(bidirectional_folders.RECORDED["llama"])
    causal = with_entries(tmp_path / "causal.gguf", path, {"llama-embed.attention.causal": TRUE})
    with Model(causal, device="cpu") as model:
        assert model.engine.config.causal
        assert np.abs(model.embed(bidirectional_folders.TEXTS) - vectors(path)).max() > 0.01


def test_a_head_reads_the_state_that_the_configuration_names(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m", "LlamaBidirectionalForSequenceClassification", pooling="avg")
    folder.config |= {"id2label": {"0": "x"}, "max_position_embeddings": 200}
    folder.tensors["score.weight"] = np.ones((1, 32), np.float32)
    with Model(convert(folder.write(), tmp_path / "m.gguf"), device="cpu") as model:
        assert (model.engine.head.state, model.engine.config.causal) == ("mean", False)


@pytest.mark.parametrize(
    ("name", "fields", "architecture"),
    [
        ("Gemma3TextModel", {}, "gemma3"),
        ("Gemma3TextModel", {"use_bidirectional_attention": True}, "gemma-embedding"),
        ("BertModel", {"is_causal": False}, "bert"),
    ],
)
def test_a_folder_states_whether_its_attention_is_causal(
    tmp_path: Path, name: str, fields: dict[str, Any], architecture: str
) -> None:
    source, _ = find_source(SOURCES, Fields(tmp_path, {"architectures": [name], **fields}))
    assert source.architecture == architecture
