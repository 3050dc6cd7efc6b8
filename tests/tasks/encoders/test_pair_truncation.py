"""Pairs that do not fit the context, next to the libraries that cut them by the rule ``longest_first``."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from support.encoder_tasks import opened
from support.task_folders import RANKERS
from tokenizers import Tokenizer

from metal_prefill import ContextOverflowError, Model
from metal_prefill.tasks._pairs import encode_pair, kept_lengths
from metal_prefill.tasks._prompts import PromptRules
from metal_prefill.tasks._reranking import Options, encode_documents

CONTEXT = 40
RULES = PromptRules("end")
WORDS = ("the", "king", "is", "dead", "unaffable")


@pytest.fixture(params=RANKERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return RANKERS[request.param](tmp_path / "m").write()


def text(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 50)))


def check_pairs(model: Model, ids_of: Callable[[str, str], list[int]]) -> None:
    """Compare the tokens of random pairs with those of another library."""
    random = Random(1)
    for _ in range(15):
        query, documents = text(random), [text(random) for _ in range(4)]
        ranking = encode_documents(model.engine, query, documents, Options(rules=RULES))
        assert [ids.tolist() for ids in ranking.prompts] == [ids_of(query, text) for text in documents]


def test_pairs_are_cut_as_by_tokenizers(folder: Path) -> None:
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with opened(folder) as model:
        assert model.max_context <= CONTEXT
        theirs.enable_truncation(model.max_context, strategy="longest_first")
        check_pairs(model, lambda query, document: theirs.encode(query, document).ids)


def test_the_longer_text_is_cut_first() -> None:
    assert kept_lengths(3, 4, 7) == (3, 4)
    assert kept_lengths(3, 9, 8) == (3, 5)
    assert kept_lengths(9, 3, 8) == (5, 3)
    assert kept_lengths(9, 9, 7) == (3, 4)
    assert kept_lengths(10, 9, 7) == (4, 3)
    assert kept_lengths(0, 9, 1) == (0, 1)


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
