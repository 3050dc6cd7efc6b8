"""Late interaction, next to sentence-transformers', and checkpoints of Stanford's ColBERT."""

import json
from pathlib import Path
from string import punctuation
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import NEAR, FileOf, opened, scores_of
from support.files.gguf_bytes import Value, integer, string
from support.files.gguf_mutator import with_entries
from support.folders import encoder_tokenizers, model_folders, task_folders, tokenizer_folders
from support.folders.model_folders import read
from support.folders.task_folders import DOCUMENTS, LATE, LONG_DOCUMENT, LONG_QUERY, QUERY, TEXTS
from tokenizers import Tokenizer

from metal_prefill import ContextOverflowError, GGUFError
from metal_prefill.conversion import convert
from metal_prefill.conversion._folder import Fields
from metal_prefill.conversion._text_settings import colbert_metadata
from metal_prefill.conversion._vocabulary import read_vocabulary
from metal_prefill.files._metadata_keys import EXPANSION_KEYS, PROMPT_KEYS
from metal_prefill.tasks import maxsim
from metal_prefill.tasks._prompts import PromptForm, PromptRules
from metal_prefill.tasks._text_passes import TextPasses, whole_texts


@pytest.mark.parametrize("name", LATE)
def test_scores_of_late_interaction_match_sentence_transformers(
    device: str, file_of: FileOf, name: str
) -> None:
    recorded, documents = task_folders.recorded_vectors(), [text for text in DOCUMENTS if text]
    scores = recorded[f"{name}/scores"]
    with opened(file_of(LATE[name]), device) as model:
        query = model.embed([QUERY], instruction="query")[0]
        np.testing.assert_allclose(query, recorded[f"{name}/query"], rtol=0, atol=4 * NEAR[device])
        vectors = model.embed(documents, instruction="document", pooling="none")
        np.testing.assert_allclose(vectors[0], recorded[f"{name}/document"], rtol=0, atol=4 * NEAR[device])
        near = 2e-6 if device == "cpu" else 2e-3
        np.testing.assert_allclose(maxsim(query, vectors), scores, rtol=near)
        for options in ({}, {"how": "late"}):
            np.testing.assert_allclose(scores_of(model, documents, **options), scores, rtol=near)


@pytest.mark.parametrize("name", LATE)
def test_longer_queries_are_cut_only_on_request(device: str, file_of: FileOf, name: str) -> None:
    expected = task_folders.recorded_vectors()[f"{name}/long_query"]
    with opened(file_of(LATE[name]), device) as model:
        if name not in ("seen, fixed", "PyLate"):
            query = model.embed([LONG_QUERY], instruction="query")[0]
        else:
            for call in (
                lambda: model.embed([LONG_QUERY], instruction="query"),
                lambda: model.rerank(LONG_QUERY, DOCUMENTS),
            ):
                with pytest.raises(
                    ContextOverflowError, match=rf"39 tokens exceed the {len(expected)} of this"
                ):
                    call()
            with pytest.warns(UserWarning, match="lost its end"):
                model.rerank(LONG_QUERY, DOCUMENTS[:1], truncate="end")
            with pytest.warns(
                UserWarning, match=rf"1 of 1 texts .* of {len(expected)} tokens and lost their ends"
            ):
                query = model.embed([LONG_QUERY], instruction="query", truncate="end")[0]
        np.testing.assert_allclose(query, expected, rtol=0, atol=4 * NEAR[device])


@pytest.mark.parametrize("name", LATE)
def test_longer_documents_are_cut_only_on_request(device: str, file_of: FileOf, name: str) -> None:
    expected, query = (task_folders.recorded_vectors()[f"{name}/{key}"] for key in ("long_document", "query"))
    limit = 38 if name == "PyLate" else 40
    with opened(file_of(LATE[name]), device) as model:
        for call in (
            lambda: model.embed([LONG_DOCUMENT], instruction="document"),
            lambda: model.rerank(QUERY, [LONG_DOCUMENT]),
        ):
            with pytest.raises(ContextOverflowError, match=rf" 0: \d+ tokens exceed the .*{limit}"):
                call()
        with pytest.warns(UserWarning, match=rf"1 of 1 texts .* of {limit} tokens and lost their ends"):
            document = model.embed([LONG_DOCUMENT], instruction="document", truncate="end")[0]
        with pytest.warns(UserWarning, match=rf"1 of 1 documents .* of {limit} tokens"):
            (ranked,) = model.rerank(QUERY, [LONG_DOCUMENT], truncate="end")
        score = (query @ expected.T).max(axis=1).sum()
        assert ranked.score == pytest.approx(score, rel=2e-6 if device == "cpu" else 2e-3)
        np.testing.assert_allclose(document, expected, rtol=0, atol=4 * NEAR[device])


def test_only_queries_are_expanded(file_of: FileOf) -> None:
    with opened(file_of(LATE["unseen"])) as model:
        for options in ({}, {"instruction": "document"}, {"instruction": "query", "pooling": "mean"}):
            vectors = model.embed(["who"], **options)[0]  # type: ignore[arg-type]
            assert vectors.ndim == 1 or len(vectors) < 32
        assert len(model.embed(["who"], instruction="query")[0]) == 32


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("length", integer(0), f"{EXPANSION_KEYS}length is 0, must be between 1 and"),
        ("length", string("32"), f"{EXPANSION_KEYS}length has type string, expected an integer"),
        ("token", integer(1 << 20), f"{EXPANSION_KEYS}token is 1048576, must be between 0 and"),
        ("seen", integer(1), f"{EXPANSION_KEYS}seen has type uint32, expected bool"),
        ("fixed", None, f"{EXPANSION_KEYS}fixed is missing"),
        ("length", integer(41), "the query: 41 tokens exceed the context of 40"),
    ],
)
def test_wrong_expansions_are_rejected(
    file_of: FileOf, tmp_path: Path, key: str, value: Value | None, message: str
) -> None:
    entries = {f"{EXPANSION_KEYS}{key}": value}
    path = with_entries(tmp_path / "m.gguf", file_of(LATE["unseen"]), entries)
    with opened(path) as model, pytest.raises((GGUFError, ContextOverflowError), match=message):
        model.rerank(QUERY, DOCUMENTS)


@pytest.mark.parametrize(
    ("expansions", "message"),
    [
        ([0, 1], "there are 2 expansions for 1 texts"),
        ([3], "an expansion of 3 tokens leaves 0 of the text: at least one is needed"),
        ([-1], "an expansion of -1 tokens leaves 4 of the text"),
    ],
)
def test_expansions_outside_a_text_are_rejected(file_of: FileOf, expansions: list[int], message: str) -> None:
    with opened(file_of(LATE["unseen"])) as model:
        passes, text = TextPasses(model.engine), np.array([1, 2, 3], np.int32)
        with pytest.raises(ValueError, match=message):
            passes.check(whole_texts(passes, [text], "none", expansions), str)


def test_stored_vectors_are_compared() -> None:
    rng = np.random.default_rng(5)
    query, *documents = (rng.normal(size=(n, 8)).astype(np.float32) for n in (3, 4, 1, 6))
    expected = [(query.astype(float) @ d.astype(float).T).max(axis=1).sum() for d in documents]
    empty = np.zeros((0, 8), np.float32)
    np.testing.assert_allclose(maxsim(query, [*documents, empty]), [*expected, 0], rtol=1e-6)
    assert maxsim(query, []).shape == (0,)
    with pytest.raises(ValueError, match=r"document 1 has the shape \(4,\) and the query \(3, 8\)"):
        maxsim(query, [empty, np.zeros(4, np.float32)])


def test_late_interaction_works_without_a_projection(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m").pool()
    with opened(convert(folder.write(), tmp_path / "m.gguf")) as model:
        query, *documents = model.embed([QUERY, *DOCUMENTS], pooling="none")
        expected = [(query @ rows.T).max(axis=1).sum() for rows in documents]
        np.testing.assert_allclose(scores_of(model, how="late"), expected, rtol=1e-6)


def test_token_vectors_are_projected_and_truncated(file_of: FileOf) -> None:
    with opened(file_of(task_folders.late_interaction)) as model:
        whole = model.embed(TEXTS)
        assert {rows.shape[1] for rows in whole} == {16}
        np.testing.assert_allclose(np.linalg.norm(whole[0], axis=1), 1, rtol=1e-6)
        cut = model.embed(TEXTS, dimensions=4)
        np.testing.assert_allclose(np.linalg.norm(cut[0], axis=1), 1, rtol=1e-6)
        assert np.all(
            np.abs((cut[0] * whole[0][:, :4]).sum(axis=1) - np.linalg.norm(whole[0][:, :4], axis=1)) < 1e-5
        )
        with pytest.raises(ValueError, match=r"dimensions.*16"):
            model.embed(TEXTS, dimensions=17)


@pytest.mark.parametrize(
    ("settings", "expansion", "skipped"),
    [
        ({}, (32, False), punctuation),
        ({"attend_to_mask_tokens": True, "query_maxlen": 20}, (20, True), punctuation),
        ({"mask_punctuation": False}, (32, False), ""),
        (None, (32, False), punctuation),
    ],
)
def test_a_checkpoint_of_colbert_states_markers_masks_and_punctuation(
    tmp_path: Path, settings: dict[str, Any] | None, expansion: tuple[int, bool], skipped: str
) -> None:
    """A checkpoint that states none has those of the library."""
    folder = task_folders.stanford(tmp_path / "m", **(settings or {}))
    if settings is None:
        folder.tensors["linear.weight"] = np.resize(folder.tensors["linear.weight"], (128, 32))
        (folder.path / "artifact.metadata").unlink()
    fields, tensors = read(convert(folder.write(), tmp_path / "m.gguf"))
    ids = json.loads((folder.path / "tokenizer.json").read_bytes())["model"]["vocab"]
    found = {
        key.removeprefix(EXPANSION_KEYS): value
        for key, value in fields.items()
        if key.startswith(EXPANSION_KEYS)
    }
    length, seen = expansion
    assert found == {"length": length, "seen": seen, "fixed": True, "token": ids["[MASK]"]}
    assert [fields[f"{PROMPT_KEYS}{name}"] for name in ("query", "document")] == ["[unused0] ", "[unused1] "]
    assert {fields["tokenizer.ggml.token_type"][ids[f"[unused{i}]"]] for i in (0, 1)} == {3}
    assert set(fields.get("metal_prefill.skipped_tokens", ())) == {
        ids[symbol] for symbol in skipped if symbol in ids
    }
    np.testing.assert_array_equal(tensors["dense_2.weight"], folder.tensors["linear.weight"])


def test_texts_follow_their_markers_as_they_follow_a_full_stop(tmp_path: Path) -> None:
    """A byte-level vocabulary has other tokens for words after a space."""
    made = tokenizer_folders.byte_level()
    path = tokenizer_folders.write(tmp_path, made, {"mask_token": "</s>"})
    (path / "artifact.metadata").write_text(json.dumps({"query_token_id": "<s>", "doc_token_id": "<s>"}))
    vocabulary = read_vocabulary(path, Fields.read(path / "config.json"))
    form = PromptForm(colbert_metadata(path, vocabulary)[f"{PROMPT_KEYS}query"], spells_tokens=True)
    ours, theirs = encoder_tokenizers.open_folder(path), Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in ("the king", " the", "  a  b", ".", "1,2", ""):
        expected = [ours.bos_id, *theirs.encode(f". {text}", add_special_tokens=False).ids[1:]]
        assert form.tokens(ours, text, PromptRules()) == expected, repr(text)
