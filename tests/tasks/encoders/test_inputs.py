"""Collections of texts that tasks accept, and those that they refuse."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import FileOf, opened
from support.task_folders import CLASSIFIERS, RANKERS, TAGGERS, TEXTS

from metal_prefill import Model


class Column:
    """A column of a table whose rows have labels, like a Series of pandas that was filtered."""

    def __init__(self, texts: list[Any], first_label: int = 1) -> None:
        self.rows = dict(enumerate(texts, first_label))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, label: int) -> Any:
        return self.rows[label]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows.values())


class ArrowColumn:
    """A column of Arrow, whose items are not strings."""

    def __init__(self, texts: list[Any]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[Any]:
        return (bytes(len(text)) for text in self.texts)

    def to_pylist(self) -> list[Any]:
        return self.texts


class Table(dict[str, list[str]]):
    """A table that iterates over the names of its columns, like a DataFrame of pandas."""

    @property
    def columns(self) -> list[str]:
        return list(self)


class ArrowTable(list[list[str]]):
    """A table that iterates over columns."""

    columns: tuple[list[str], ...] = ([], [])
    column_names = ("title", "body")


TASKS: dict[str, tuple[Any, Callable[[Model, Any], Any]]] = {
    "embed": (RANKERS["bert"], lambda model, texts: model.embed(texts, pooling="mean").tolist()),
    "rerank": (RANKERS["bert"], lambda model, texts: model.rerank("a", texts)),
    "classify": (CLASSIFIERS["bert"], lambda model, texts: model.classify(texts).probabilities.tolist()),
    "label": (TAGGERS["bert"], lambda model, texts: model.label_tokens(texts)),
}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest, file_of: FileOf) -> Iterator[Callable[[Any], Any]]:
    make, call = TASKS[request.param]
    with opened(file_of(make)) as model:
        yield lambda texts: call(model, texts)


@pytest.mark.parametrize(
    "collect",
    [tuple, iter, np.array, lambda texts: np.array(texts, object), Column, ArrowColumn],
    ids=["tuple", "generator", "array of str", "array of objects", "column", "Arrow"],
)
def test_any_sequence_has_the_result_of_a_list(task: Callable[[Any], Any], collect: Any) -> None:
    assert task(collect(TEXTS)) == task(TEXTS)


def test_what_is_not_a_sequence_of_texts_is_refused(task: Callable[[Any], Any]) -> None:
    for texts, message in [
        ("a", r"must be a sequence of strings, got one str"),
        (b"a", r"must be a sequence of strings, got one bytes"),
        (3, r"must be a sequence of strings, got one int"),
        (np.array("a"), r"must be a sequence of strings, got one ndarray"),
        ({"a", "b"}, r"got a set, which has no order"),
        (frozenset("ab"), r"got a frozenset, which has no order"),
        ({"title": ["a"]}, r"must be one column of strings, got a dict: pass one, such as \w+\['title'\]"),
        (Table(title=["a"]), r"got a Table: pass one, such as \w+\['title'\]"),
        (ArrowTable(), r"got a ArrowTable: pass one, such as \w+\['title'\]"),
        ([["a", "b", "c"]], r"0 must be a string"),
        (Column(["a", float("nan")]), r"1 must be a string.*, got float"),
    ]:
        with pytest.raises(TypeError, match=message):
            task(texts)


def test_pairs_may_be_rows_of_an_array(file_of: FileOf) -> None:
    pairs = [("a", "b"), ("c d", "e")]
    with opened(file_of(CLASSIFIERS["bert"])) as model:
        expected = model.classify(pairs).probabilities
        np.testing.assert_array_equal(model.classify(np.array(pairs)).probabilities, expected)
