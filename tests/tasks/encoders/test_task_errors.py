"""Collections of texts that tasks accept; texts, options and methods that an encoder does not take."""

import asyncio
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoder_tasks import TASKS, FileOf, opened
from support.files.gguf_bytes import string
from support.files.gguf_mutator import with_entries
from support.folders import model_folders, task_folders
from support.folders.encoder_folders import private_parts
from support.folders.entity_folders import RECORDED
from support.folders.model_folders import Folder
from support.folders.task_folders import CLASSIFIERS, DOCUMENTS, QUERY, RANKERS, TAGGERS, TEXTS
from support.programs import Run
from support.small_models import CLASSIFIERS as SMALL_CLASSIFIERS
from support.small_models import EMBEDDERS, SmallModel, with_tensor, write

from metal_prefill import ContextOverflowError, GGUFError, Model, NumericalError
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
    path = with_tensor(tmp_path / "m.gguf", file_of(make), tensor, lambda values: values.fill(value))
    with (
        opened(path) as model,
        np.errstate(invalid="ignore"),
        pytest.raises(NumericalError, match=r"is (nan|-?inf)$"),
    ):
        call(model)


def test_long_texts_are_rejected_or_truncated(file_of: FileOf) -> None:
    texts = ["a", "the king is dead " * 30]
    with opened(file_of(TAGGERS["bert"])) as model:
        with pytest.raises(ContextOverflowError, match=r"text 1: .* tokens exceed the context of 40"):
            model.label_tokens(texts)
        with pytest.warns(UserWarning, match=r"1 of 2 .* lost their ends: text 1"):
            model.label_tokens(texts, truncate="end")


Call = Callable[[Model], Any]
# Models by the name that a row of `REFUSED` gives them.
MADE: dict[str, Callable[[Path], Folder]] = {
    "plain": lambda path: model_folders.bert(path).pool(),
    "pairs": RANKERS["bert"],
    "tags": TAGGERS["bert"],
    "parts": private_parts,
    "late": task_folders.late_interaction,
    "entities": RECORDED["bert"],
    "labelled": RECORDED["modernbert and bert"],
}
WRITTEN: dict[str, SmallModel] = {
    "yes or no": SMALL_CLASSIFIERS["qwen3, yes and no"],
    "classes": SMALL_CLASSIFIERS["qwen3, three classes"],
    "vectors": EMBEDDERS["qwen3, last"],
}
PAIR = "{query} {document}"


def ranks(query: Any = QUERY, documents: Any = DOCUMENTS, *more: Any, **options: Any) -> Call:
    return lambda model: model.rerank(query, documents, *more, **options)


def classifies(texts: Any = TEXTS, *more: Any, **options: Any) -> Call:
    return lambda model: model.classify(texts, *more, **options)


def labels(texts: Any = TEXTS, **options: Any) -> Call:
    return lambda model: model.label_tokens(texts, **options)


def biased(**biases: Any) -> Call:
    return labels(transitions=biases)


def embeds(**options: Any) -> Call:
    return lambda model: model.embed(["a"], **options)


def finds(texts: Any = ("a",), of: Any = ("b",), **options: Any) -> Call:
    return lambda model: model.find_entities(texts, of, **options)


# Models, calls, and the errors.
REFUSED: list[tuple[str, Call, type[Exception], str]] = [
    ("pairs", ranks(template=PAIR), ValueError, "template is not supported"),
    ("pairs", ranks(instruction="web search"), ValueError, "instruction is not supported"),
    ("pairs", ranks(how="late"), ValueError, "has a classification head, which scores pairs"),
    ("pairs", ranks(how="early"), ValueError, "how must be 'late' or None, got 'early'"),
    ("pairs", ranks(label="x"), ValueError, "label is 'x', but .* a head of 1 classes"),
    ("pairs", labels(), ValueError, "has labels for whole texts: use `classify`"),
    ("pairs", classifies(TEXTS, ["a", "b"]), ValueError, "predicts no text: leave `labels`"),
    ("pairs", classifies([("a", "b", "c")]), TypeError, "text 0 must be a string or a pair of .*got tuple"),
    ("late", ranks(template=PAIR), ValueError, "template is not supported"),
    ("late", labels(), ValueError, "has no classification head"),
    ("late", classifies(), ValueError, "no classification head .*: use `embed`, or `rerank`$"),
    ("late", classifies(TEXTS, ["a", "b"]), ValueError, "predicts no text: use `embed`, or `rerank`$"),
    ("tags", classifies(), ValueError, "has labels for tokens: use `label_tokens`"),
    ("tags", labels(strategy="best"), ValueError, "strategy must be one of"),
    ("tags", labels(["a", "\ud800"]), ValueError, r"text 1: .*surrogates"),
    ("tags", labels("a"), TypeError, "texts must be a sequence of strings"),
    ("tags", finds(), ValueError, "it has no head of GLiNER: use `label_tokens`"),
    ("tags", labels(strategy="viterbi"), ValueError, "needs BIOES tags: .* has no label O, or none with E-"),
    ("tags", labels(transitions={}), ValueError, "transitions need the strategy 'viterbi', got 'simple'"),
    ("parts", biased(background=1.0), ValueError, "transitions must be one of background_stay, "),
    ("parts", biased(end_to_start="1"), TypeError, r"\['end_to_start'\] must be a number, got str"),
    ("parts", biased(end_to_start=True), TypeError, "must be a number, got bool"),
    ("parts", biased(end_to_start=math.nan), ValueError, r"\['end_to_start'\] is nan, must be finite"),
    ("plain", ranks(), ValueError, "is an encoder without a classification head: it does not rank"),
    ("plain", lambda model: model.embed_hybrid(["a"]), ValueError, "lacks the heads for weights"),
    *(
        (name, call, error, message)
        for name in ("entities", "labelled")
        for call, error, message in (
            (finds(of=[]), ValueError, "labels must name at least one"),
            (finds(of="person"), TypeError, "labels must be a sequence of strings, got one str"),
            (finds(of=["a", 1]), TypeError, "label 1 must be a string, got int"),
            (finds(of=["a", "\u200b"]), ValueError, "label '\\\\u200b' has no tokens"),
            (finds(threshold=1.5), ValueError, "threshold must be between 0 and 1, got 1.5"),
            (finds(threshold="1"), TypeError, "threshold must be a number, got str"),
            (finds(flat_ner=1), TypeError, "flat_ner must be a bool, got int"),
            (finds(truncate="start"), ValueError, "truncate must be one of error, end"),
            (finds([None]), TypeError, "text 0 must be a string, got NoneType"),
            (finds(["\ud800"]), ValueError, r"text 0: .*surrogates"),
            (labels(), ValueError, "labels that a call names: use `find_entities`"),
            (lambda model: list(model.generate("a", 1)), ValueError, "encoder, .*: use `find_entities`"),
        )
    ),
    ("yes or no", ranks(QUERY, ["\ud800"], template=PAIR), ValueError, r"document 0: .*surrogates"),
    (
        "yes or no", ranks(QUERY, ["a", "b " * 3000], template=PAIR),
        ContextOverflowError, r"document 1: \d+ tokens exceed the context of 1024",
    ),
    ("yes or no", ranks(template="{query}"), ValueError, "template for reranking has {query} and {document}"),
    ("yes or no", ranks(QUERY, ["a"], 0, template=PAIR), ValueError, "top_n must be at least 1, got 0"),
    ("yes or no", ranks("", ["a", ""], template="{query}{document}"), ValueError, "its prompt has no tokens"),
    ("classes", ranks(template=PAIR), ValueError, "head of 3 classes .low, middle, high.: set `label`"),
    ("vectors", embeds(dimensions=65), ValueError, "dimensions must be between 1 and 64, got 65"),
    ("vectors", embeds(dimensions=0), ValueError, "dimensions must be between 1 and 64, got 0"),
    ("vectors", embeds(pooling="sum"), ValueError, "must be one of none, mean, .*, mean_sqrt_len; got 'sum'"),
    ("vectors", embeds(pooling="rank"), ValueError, "use `rerank`, or `classify`"),
    ("vectors", embeds(pooling="cls"), ValueError, "its attention is causal"),
    ("vectors", embeds(unicode="nfc"), ValueError, "unicode must be one of NFC; got 'nfc'"),
    ("vectors", lambda model: model.embed([*["a"] * 7, "\udc80", "b"]), ValueError, r"text 7: .*surrogates"),
    ("demo", embeds(), ValueError, "sets no pooling .llama.pooling_type.: set `pooling`, such as"),
    ("demo", lambda model: model.embed_sparse(["a"]), ValueError, "no head for vectors over"),
    ("demo", ranks(), ValueError, "no template is known for llama: pass `template`"),
    # Documents after the first are not encoded.
    ("demo", ranks(QUERY, ["a", "a " * 3000], template=PAIR), ValueError, "'yes' is . tokens: it is not"),
    ("demo", classifies([("a", "b")]), ValueError, "has no classification head"),
    ("demo", classifies(), ValueError, "no classification head .cls.output.weight.: pass `labels`"),
    ("demo", classifies(["a"], ["x", "x"]), ValueError, "a label appears twice"),
    ("demo", classifies(["a"], ["x"], "{label} {text}"), ValueError, "ends with {label}"),
    ("demo", classifies(["a"], []), TypeError, "labels must be a sequence of strings"),
    ("demo", classifies(["a", "word " * 5000], ["x", "y"]), ContextOverflowError, "text 1, label 'x': "),
    ("demo", classifies(["a"], ["x", "y " * 5000]), ContextOverflowError, "text 0, label 'y y"),
    ("demo", classifies(["a"], ["x"], 3), TypeError, "template must be a string, got int"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model_of(
    file_of: FileOf, demo_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Model]]:
    """Return a function that opens a model by its name, once."""
    with ExitStack() as stack:

        @cache
        def model_of(name: str) -> Model:
            if name in WRITTEN:
                path = write(tmp_path_factory.mktemp("model") / "m.gguf", WRITTEN[name])
            else:
                path = file_of(MADE[name]) if name in MADE else demo_path
            return stack.enter_context(opened(path))

        yield model_of


@pytest.mark.parametrize(("name", "call", "error", "message"), REFUSED, ids=[row[3] for row in REFUSED])
def test_calls_that_a_model_does_not_take_are_refused_by_name(
    model_of: Callable[[str], Model], name: str, call: Call, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(model_of(name))


def test_generating_methods_name_the_alternatives(file_of: FileOf, tmp_path: Path) -> None:
    from metal_prefill import Conversation, Scheduler

    async def first_of(model: Model) -> str:
        return await anext(aiter(model.generate_async("a")))

    folder = model_folders.bert(tmp_path / "m").pool()
    plain = convert(folder.write(), tmp_path / "plain.gguf")
    for path, use in (
        (plain, "`embed`"),
        (file_of(RANKERS["bert"]), "`rerank` or `classify`"),
        (file_of(TAGGERS["bert"]), "`label_tokens`"),
        (file_of(task_folders.late_interaction), "`embed`, or `rerank`"),
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


@pytest.mark.parametrize("command", ["run", "chat", "perplexity", "bench"])
def test_generating_commands_print_a_one_line_error(
    file_of: FileOf, tmp_path: Path, errors: Run, command: str
) -> None:
    path = file_of(TAGGERS["bert"])
    (tmp_path / "text").write_text("a b c d e f g h")
    arguments = {"run": ("-p", "a"), "perplexity": ("-f", tmp_path / "text")}.get(command, ())
    said = "does not generate or score text: use `metal-prefill label`"
    if command == "bench":
        said = "does not generate text: use `metal-prefill bench embed`"
    expected = f"error: model.gguf is an encoder, which {said}\n"
    assert errors(command, "-m", path, *arguments) == expected


@pytest.mark.usefixtures("own_cache")
def test_errors_name_the_folder_of_a_model(tmp_path: Path, errors: Run) -> None:
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
    printed = errors("embed", "-m", late, "-f", texts, "-o", tmp_path / "v.npy")
    assert "error: late has a vector for each token" in printed


def test_a_damaged_vocabulary_is_an_error_of_the_file(file_of: FileOf, tmp_path: Path) -> None:
    entries = {"tokenizer.ggml.model": string("t5")}
    path = with_entries(tmp_path / "m.gguf", file_of(model_folders.bert), entries)
    with opened(path) as model:
        for call in (
            lambda: model.embed(["a"], pooling="mean"),
            lambda: model.rerank("a", ["b"], how="late"),
        ):
            with pytest.raises(GGUFError, match=rf"^{re.escape(str(path))}: metadata .* is missing"):
                call()


class Column:
    """A column of a table whose rows have labels, like a Series of pandas that was filtered."""

    def __init__(self, texts: list[Any]) -> None:
        self.rows = dict(enumerate(texts, 1))

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
