"""Special tokens that texts spell, and pairs that do not fit the context, next to other libraries."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import TASKS, FileOf, opened
from support.folders.model_folders import Folder, values
from support.folders.task_folders import CLASSIFIERS, RANKERS
from tokenizers import Tokenizer

from metal_prefill import ContextOverflowError, Model
from metal_prefill.conversion import convert
from metal_prefill.tasks._pairs import encode_pair
from metal_prefill.tasks._prompts import PromptRules
from metal_prefill.tasks._reranking import Options, encode_documents

CALLS: dict[str, tuple[Callable[[Path], Folder], Callable[..., Any]]] = {
    **TASKS,
    "query": (RANKERS["bert"], lambda m, texts, **o: m.rerank(texts[0], ["d"], **o)),
    "pair": (
        CLASSIFIERS["bert"],
        lambda m, texts, **o: m.classify([("a", *texts)], **o).probabilities.tolist(),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_task_recognizes_special_tokens(file_of: FileOf, name: str) -> None:
    make, call = CALLS[name]
    with opened(file_of(make)) as model:
        texts = ["a [MASK] b"]
        assert call(model, texts) == call(model, texts, split_special_tokens=False)
        assert call(model, texts) != call(model, texts, split_special_tokens=True)
        with pytest.raises(TypeError, match="split_special_tokens must be a bool or None, got str"):
            call(model, texts, split_special_tokens="yes")


def test_generative_models_recognize_them_only_on_request(demo: Model) -> None:
    for options in ({}, {"split_special_tokens": True}):
        plain = demo.embed(["a <|endoftext|> b"], pooling="none", **options)[0]  # type: ignore[arg-type]
        assert len(plain) > len(
            demo.embed(["a <|endoftext|> b"], pooling="none", split_special_tokens=False)[0]
        )


def test_a_separator_in_a_single_text_begins_no_second_text(device: str, tmp_path: Path) -> None:
    """In transformers, too, the type of a token is the number of its text."""
    vectors, probabilities = [], []
    for changes in (False, True):
        folder = CLASSIFIERS["bert"](tmp_path / str(changes))
        types = folder.tensors["bert.embeddings.token_type_embeddings.weight"]
        if changes:
            types[1] = values(types[1].shape, 9)
        with opened(convert(folder.write(), tmp_path / f"{changes}.gguf"), device) as model:
            vectors.append(model.embed(["a [SEP] b", "a"], pooling="mean"))
            probabilities.append(model.classify(["a [SEP] b", ("a [SEP] c", "b"), "x"]).probabilities)
    np.testing.assert_array_equal(vectors[0], vectors[1])
    changed = (probabilities[0] != probabilities[1]).any(axis=1)
    assert changed.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (CLASSIFIERS["bert"], lambda m, text: m.classify([(text, "b")]).probabilities.tolist()),
        (RANKERS["bert"], lambda m, text: m.rerank(text, ["b"])[0].score),
    ],
    ids=["classify", "rerank"],
)
def test_a_separator_does_not_end_the_first_text_of_a_pair(
    device: str, tmp_path: Path, make: Callable[[Path], Folder], call: Callable[[Model, str], Any]
) -> None:
    """The result is that of another token with the same embedding."""
    folder = make(tmp_path / "m")
    table = folder.tensors["bert.embeddings.word_embeddings.weight"]
    table[4] = table[3]  # [MASK] and [SEP]
    with opened(convert(folder.write(), tmp_path / "m.gguf"), device) as model:
        assert call(model, "a [SEP] c") == call(model, "a [MASK] c") != call(model, "a c")


CONTEXT = 40
RULES = PromptRules("end")
WORDS = ("the", "king", "is", "dead", "unaffable")


@pytest.fixture(params=["bert", "xlm-roberta", "modernbert"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return RANKERS[request.param](tmp_path / "m").write()


def text(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 50)))


def test_pairs_are_cut_as_by_tokenizers(folder: Path) -> None:
    theirs, random = Tokenizer.from_file(str(folder / "tokenizer.json")), Random(1)
    with opened(folder) as model:
        assert model.max_context <= CONTEXT
        theirs.enable_truncation(model.max_context, strategy="longest_first")
        for _ in range(15):
            query = text(random)
            documents = [query, *(text(random) for _ in range(3))]
            ranking = encode_documents(model.engine, query, documents, Options(rules=RULES))
            expected = [theirs.encode(query, document).ids for document in documents]
            assert [ids.tolist() for ids in ranking.prompts] == expected


def test_the_texts_that_lost_their_ends_are_named(folder: Path) -> None:
    query, long = "the king is dead " * 10, "dead " * 50
    with opened(folder) as model:
        with pytest.warns(UserWarning, match="lost (its|their) end") as warned:
            model.rerank(query, ["the", long], truncate="end")
        messages = [str(warning.message) for warning in warned]
        assert [message.startswith("the query lost its end") for message in messages] == [True, False]
        assert "1 of 2 documents" in messages[1]
        assert messages[1].endswith("lost their ends: document 1")
        with pytest.warns(UserWarning, match="1 of 2 texts .*: text 1"):
            model.classify(["the", (query, "king")], truncate="end")


def test_a_context_without_room_for_two_texts_is_an_error(folder: Path) -> None:
    with opened(folder) as model:
        around = model.tokenizer.frame.pair_tokens
        with Model(folder, device="cpu", max_context=around + 1) as short:
            with pytest.raises(
                ContextOverflowError, match=rf"pair 3: the context of {around + 1} has no room"
            ):
                encode_pair(short.engine, [5, 6], [7], "pair 3", RULES)
            assert encode_pair(short.engine, [], [7], "pair 3", RULES).ids.tolist()[-2] == 7
