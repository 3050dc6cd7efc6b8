"""Collections of texts that tasks accept; texts, options and methods that an encoder does not take."""

import asyncio
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import model_folders, task_folders
from support.encoder_tasks import FileOf, opened
from support.entity_folders import RECORDED
from support.gguf_bytes import text
from support.gguf_mutator import take_apart
from support.small_models import with_tensor
from support.task_folders import CLASSIFIERS, DOCUMENTS, QUERY, RANKERS, TAGGERS, TEXTS

from metal_prefill import ContextOverflowError, GGUFError, Model, NumericalError
from metal_prefill.cli import main
from metal_prefill.conversion import convert

HEADS: dict[str, tuple[Any, str, Callable[[Model], Any]]] = {
    "a score": (RANKERS["bert"], "cls.output.weight", lambda m: m.rerank(QUERY, ["a"])),
    "a class": (RANKERS["bert"], "cls.output.bias", lambda m: m.classify(["a"])),
    "labels": (TAGGERS["bert"], "cls.output.bias", lambda m: m.label_tokens(["a"])),
    "vectors": (task_folders.late_interaction, "dense_2.weight", lambda m: m.embed(["a"], pooling="none")),
    "spans": (RECORDED["bert, names"], "entities.label.1.bias", lambda m: m.find_entities(["a"], ["b"])),
    "words": (RECORDED["bert, words"], "entities.score.1.bias", lambda m: m.find_entities(["a"], ["b"])),
    "products": (task_folders.late_interaction, "dense_2.weight", lambda m: m.rerank(QUERY, ["a"])),
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("make", "tensor", "call"), HEADS.values(), ids=HEADS.keys())
def test_a_head_with_numbers_that_are_not_finite_has_no_results(
    tmp_path: Path, file_of: FileOf, make: Any, tensor: str, call: Callable[[Model], Any], value: float
) -> None:
    def damage(values: Any) -> None:
        values.reshape(-1)[:] = value

    with (
        opened(with_tensor(tmp_path / "m.gguf", file_of(make), tensor, damage)) as model,
        np.errstate(invalid="ignore"),
        pytest.raises(NumericalError, match=r"is (nan|-?inf)$"),
    ):
        call(model)


@pytest.mark.parametrize("kind", ["pair", "text", "late"])
def test_long_texts_are_rejected_or_truncated(file_of: FileOf, kind: str) -> None:
    make = {"pair": RANKERS["bert"], "text": TAGGERS["bert"], "late": task_folders.late_interaction}[kind]
    long = "the king is dead " * 30
    with opened(file_of(make)) as model:

        def call(**options: Any) -> Any:
            if kind == "text":
                return model.label_tokens(["a", long], **options)
            return model.rerank(QUERY, ["a", long], **options)

        name = "text 1" if kind == "text" else "document 1"
        with pytest.raises(ContextOverflowError, match=f"{name}: .* tokens exceed the context of 40"):
            call()
        with pytest.warns(UserWarning, match=f"1 of 2 .* lost their ends: {name}"):
            call(truncate="end")
        if kind == "pair":
            with pytest.warns(UserWarning, match="^the query lost its end"):
                model.rerank(long, ["a"], truncate="end")
            # The tokens at the end stay, and so does the query, which is shorter.
            frame, encode = model.tokenizer.frame, model.tokenizer.encode
            first = encode(QUERY, add_bos=False)
            room = 40 - len(first) - frame.pair_tokens
            with pytest.warns(UserWarning, match="1 of 1"):
                cut = model.rerank(QUERY, [long], truncate="end")[0].score
            shorter = model.tokenizer.decode(encode(long, add_bos=False)[:room])
            assert model.rerank(QUERY, [shorter])[0].score == cut


def test_options_unsupported_by_the_model_are_rejected(file_of: FileOf) -> None:
    pairs = file_of(RANKERS["bert"])
    tags = file_of(TAGGERS["bert"])
    late = file_of(task_folders.late_interaction)
    with opened(pairs) as ranker, opened(tags) as tagger, opened(late) as projecting:
        for options, message in (
            ({"template": "{query} {document}"}, "template is not supported"),
            ({"instruction": "web search"}, "instruction is not supported"),
            ({"how": "late"}, "has a classification head, which scores pairs"),
            ({"how": "early"}, "how must be 'late' or None, got 'early'"),
        ):
            with pytest.raises(ValueError, match=message):
                ranker.rerank(QUERY, DOCUMENTS, **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="template is not supported"):
            projecting.rerank(QUERY, DOCUMENTS, template="{query} {document}")
        with pytest.raises(ValueError, match="has labels for whole texts: use classify"):
            ranker.label_tokens(TEXTS)
        with pytest.raises(ValueError, match="has labels for tokens: use label_tokens"):
            tagger.classify(TEXTS)
        with pytest.raises(ValueError, match="has no classification head"):
            projecting.label_tokens(TEXTS)
        with pytest.raises(ValueError, match=r"no classification head .*: use embed, or rerank$"):
            projecting.classify(TEXTS)
        with pytest.raises(ValueError, match=r"predicts no text: use embed, or rerank$"):
            projecting.classify(TEXTS, ["a", "b"])
        with pytest.raises(ValueError, match="is an encoder, which predicts no text: leave labels out"):
            ranker.classify(TEXTS, ["a", "b"])
        with pytest.raises(TypeError, match="text 0 must be a string or a pair of strings, got tuple"):
            ranker.classify([("a", "b", "c")])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="strategy must be one of"):
            tagger.label_tokens(TEXTS, strategy="best")
        with pytest.raises(ValueError, match=r"text 1: .*surrogates"):
            tagger.label_tokens(["a", "\ud800"])
        with pytest.raises(TypeError, match="texts must be a sequence of strings"):
            tagger.label_tokens("a")


def test_generating_methods_name_the_alternatives(file_of: FileOf, tmp_path: Path) -> None:
    from metal_prefill import Conversation, Scheduler

    async def first_of(model: Model) -> str:
        return await anext(aiter(model.generate_async("a")))

    folder = model_folders.bert(tmp_path / "m")
    folder.pool()
    plain = convert(folder.write(), tmp_path / "plain.gguf")
    for path, use in (
        (plain, "embed"),
        (file_of(RANKERS["bert"]), "rerank or classify"),
        (file_of(TAGGERS["bert"]), "label_tokens"),
        (file_of(task_folders.late_interaction), "embed, or rerank"),
    ):
        with opened(path) as model, model.session() as session:
            message = f"is an encoder, which does not generate or score text: use {use}$"
            for call in (
                lambda: model.generate("a"),
                lambda: list(session.stream("a")),
                lambda: list(session.generate("a")),
                lambda: list(model.generate_many(["a"])),
                lambda: Conversation(model),
                lambda: Scheduler(model).submit("a"),
                lambda: asyncio.run(first_of(model)),
            ):
                with pytest.raises(ValueError, match=message):
                    call()
            assert session.position == model.position == 0


@pytest.mark.parametrize("command", ["run", "chat", "perplexity"])
def test_generating_commands_print_a_one_line_error(
    file_of: FileOf, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = file_of(TAGGERS["bert"])
    (tmp_path / "text").write_text("a b c d e f g h")
    arguments = {"run": ["-p", "a"], "chat": [], "perplexity": ["-f", str(tmp_path / "text")]}[command]
    assert main([command, "-m", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert (
        error == "error: model.gguf is an encoder, which does not generate or score text: use label_tokens\n"
    )


def test_a_text_benchmark_names_the_embedding_benchmark(
    file_of: FileOf, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(TAGGERS["bert"])
    assert main(["bench", "-m", str(path)]) == 2
    expected = "error: model.gguf is an encoder, which does not generate text: use bench embed\n"
    assert capsys.readouterr().err == expected


@pytest.mark.usefixtures("own_cache")
def test_errors_name_the_folder_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folders.bert(tmp_path / "my-model").write()
    with Model(folder, device="cpu") as model:
        assert repr(model).startswith("<metal_prefill.Model 'my-model' on CPU")
        with pytest.raises(ValueError, match=r"^my-model has no classification head"):
            model.classify(["a"])
    path = convert(folder, tmp_path / "m.gguf")
    with Model(path, device="cpu") as model, pytest.raises(ValueError, match=r"^m\.gguf has no class"):
        model.classify(["a"])
    late = task_folders.late_interaction(tmp_path / "late").write()
    texts = tmp_path / "texts"
    texts.write_text("a\n")
    assert main(["embed", "-m", str(late), "-f", str(texts), "-o", str(tmp_path / "v.npy")]) == 2
    assert "error: late has a vector for each token" in capsys.readouterr().err


def test_a_damaged_vocabulary_is_an_error_of_the_file(file_of: FileOf, tmp_path: Path) -> None:
    path = Path(shutil.copy(file_of(model_folders.bert), tmp_path))
    parts = take_apart(path)
    parts.metadata = [
        (name, kind, text("t5") if name == b"tokenizer.ggml.model" else value)
        for name, kind, value in parts.metadata
    ]
    path.write_bytes(parts.assemble())
    with opened(path) as model:
        for call in (
            lambda: model.embed(["a"], pooling="mean"),
            lambda: model.rerank("a", ["b"], how="late"),
        ):
            with pytest.raises(GGUFError, match=rf"^{re.escape(str(path))}: metadata .* is missing"):
                call()


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
