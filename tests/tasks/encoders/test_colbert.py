"""Checkpoints of Stanford's ColBERT, next to float64 arithmetic on the folder itself."""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import encoder_tokenizers, task_folders, tokenizer_folders
from support.bert_relatives import states
from support.encoder_tasks import NEAR, FileOf, opened, scores_of
from support.folder_reference import Array
from support.model_folders import Folder
from support.task_folders import DOCUMENTS, LONG_QUERY, QUERY
from tokenizers import Tokenizer

from metal_prefill import ContextOverflowError, GGUFError, Model, UnsupportedModelError
from metal_prefill.conversion import convert
from metal_prefill.conversion._fields import Fields
from metal_prefill.conversion._text_settings import colbert_metadata
from metal_prefill.conversion._vocabulary import read_vocabulary
from metal_prefill.files._metadata_keys import PROMPT_KEYS
from metal_prefill.tasks._prompts import PromptForm, PromptRules

QUERY_TOKENS = 32


class ColBert:
    """The model of a folder, as its paper and library describe it.

    A marker replaces the token of a full stop in front of the text. Masks fill a query up; other tokens do
    not attend to them unless `attend`.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.projection = folder.tensors["linear.weight"].astype(np.float64)
        self.tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def query(self, text: str, *, attend: bool = False) -> Array:
        ids = self._marked(text, "[unused0]")
        end = [self._id("[SEP]")]
        ids = ids if len(ids) <= QUERY_TOKENS else ids[: QUERY_TOKENS - 1] + end
        seen = len(ids)
        ids += [self._id("[MASK]")] * (QUERY_TOKENS - len(ids))
        return self._vectors(ids, QUERY_TOKENS if attend else seen)

    def document(self, text: str) -> Array:
        ids = self._marked(text, "[unused1]")
        punctuation = [self._id(symbol) for symbol in string.punctuation]
        return self._vectors(ids, len(ids))[[i not in punctuation for i in ids]]

    def score(self, query: str, document: str) -> float:
        return float((self.query(query) @ self.document(document).T).max(axis=1).sum())

    def _marked(self, text: str, marker: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(". " + text).ids
        return [ids[0], self._id(marker), *ids[2:]]

    def _id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        return -1 if found is None else found

    def _vectors(self, ids: list[int], seen: int) -> Array:
        x = states(self.folder, np.array(ids), "bert.", {}, seen)
        vectors = x @ self.projection.T
        unit: Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> ColBert:
    folder = task_folders.stanford(tmp_path_factory.mktemp("colbert"))
    return ColBert(folder)


def test_vectors_and_scores_match_float64(device: str, file_of: FileOf, expected: ColBert) -> None:
    near: dict[str, Any] = {"rtol": 0, "atol": 4 * NEAR[device]}
    with opened(file_of(task_folders.stanford), device) as model:
        for query in (QUERY, "who", ""):
            vectors = model.embed([query], instruction="query")[0]
            np.testing.assert_allclose(vectors, expected.query(query), **near)
        with pytest.raises(ContextOverflowError, match="exceed the 32 of this model's queries"):
            model.embed([LONG_QUERY], instruction="query")
        with pytest.warns(UserWarning, match="lost their ends"):
            cut = model.embed([LONG_QUERY], instruction="query", truncate="end")[0]
        np.testing.assert_allclose(cut, expected.query(LONG_QUERY), **near)
        scores = [expected.score(QUERY, document) for document in DOCUMENTS]
        np.testing.assert_allclose(scores_of(model), scores, rtol=2e-6 if device == "cpu" else 2e-3)


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


def test_tokens_attend_to_masks_on_request(tmp_path: Path) -> None:
    folder = task_folders.stanford(tmp_path / "folder", attend_to_mask_tokens=True)
    with opened(convert(folder.write(), tmp_path / "m.gguf")) as model:
        vectors = model.embed([QUERY], instruction="query")[0]
    np.testing.assert_allclose(vectors, ColBert(folder).query(QUERY, attend=True), atol=4 * NEAR["cpu"])


def test_punctuation_is_compared_on_request(tmp_path: Path, file_of: FileOf, expected: ColBert) -> None:
    folder = task_folders.stanford(tmp_path / "folder", mask_punctuation=False)
    with (
        opened(convert(folder.write(), tmp_path / "m.gguf")) as model,
        opened(file_of(task_folders.stanford)) as usual,
    ):
        documents = ["!?", "The king, the queen: dead.", "who?"]
        query, scores = expected.query(QUERY), scores_of(model, documents)
        whole = model.embed(documents, instruction="document")
        np.testing.assert_allclose(scores, [(query @ rows.T).max(axis=1).sum() for rows in whole], rtol=2e-6)
        assert np.all(scores >= scores_of(usual, documents))
        assert np.any(scores > scores_of(usual, documents))


def test_a_folder_opens_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: ColBert) -> None:
    """A changed setting makes another conversion, although no other file changes."""
    monkeypatch.setenv("METAL_PREFILL_CACHE", str(tmp_path / "cache"))
    folder = task_folders.stanford(tmp_path / "folder")
    folder.write()
    lengths = []
    for length in (32, 20):
        task_folders.stanford(tmp_path / "folder", query_maxlen=length)
        with Model(folder.path, device="cpu", compute="f32") as model:
            lengths.append(len(model.embed(["who"], instruction="query")[0]))
    assert lengths == [32, 20]


@pytest.mark.parametrize(
    ("settings", "config", "error", "message"),
    [
        ({"similarity": "l2"}, {}, UnsupportedModelError, "similarity is 'l2'; supported: 'cosine'"),
        ({"dim": 8}, {}, GGUFError, r"dense_2.weight has shape \(16, 32\), but dense_2_feat_out is 8"),
        ({"dim": "16"}, {}, GGUFError, "dim is str, expected an integer"),
        (
            {"query_token_id": "[Q]"},
            {},
            GGUFError,
            r"query_token_id is '\[Q\]', which the vocabulary does not",
        ),
        ({}, {"model_type": "electra"}, UnsupportedModelError, "model_type is 'electra'; supported: 'bert'"),
    ],
)
def test_wrong_settings_are_rejected(
    tmp_path: Path, settings: dict[str, Any], config: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = task_folders.stanford(tmp_path / "folder", **settings)
    folder.config |= config
    with pytest.raises(error, match=message):
        convert(folder.write(), tmp_path / "m.gguf")


def test_missing_settings_are_those_of_the_library(tmp_path: Path) -> None:
    folder = task_folders.stanford(tmp_path / "folder")
    folder.tensors["linear.weight"] = np.resize(folder.tensors["linear.weight"], (128, 32))
    (folder.path / "artifact.metadata").unlink()
    with opened(convert(folder.write(), tmp_path / "m.gguf")) as model:
        np.testing.assert_allclose(
            model.embed([QUERY], instruction="query")[0], ColBert(folder).query(QUERY), atol=4 * NEAR["cpu"]
        )


def test_a_missing_projection_is_named(tmp_path: Path) -> None:
    folder = task_folders.stanford(tmp_path / "folder")
    del folder.tensors["linear.weight"]
    with pytest.raises(GGUFError, match=r"tensor dense_2\.weight is missing"):
        convert(folder.write(), tmp_path / "m.gguf")
