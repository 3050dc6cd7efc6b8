"""Ranks, classes, labels of tokens and late interaction of encoders, next to transformers' results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter
from support import model_folders, task_folders
from support.gguf_bytes import text
from support.gguf_mutator import take_apart
from support.model_folders import DIM, Folder, with_head
from support.task_folders import (
    CLASSIFIERS,
    DOCUMENTS,
    PAIRS,
    QUERY,
    RANKERS,
    STRATEGIES,
    TAGGERS,
    TAGS,
    TEXTS,
)

from metal_prefill import ContextOverflowError, GGUFError, Model, UnsupportedModelError
from metal_prefill.cli import main
from metal_prefill.conversion import convert
from metal_prefill.files._gguf_file import GGUFFile
from metal_prefill.files._pooled_head import read_head
from metal_prefill.tasks._text_passes import TextPasses, pooled_states

# Probabilities and products of vectors: sums in float32, and products of half precision on Metal.
NEAR = {"cpu": 1e-5, "metal": 5e-3}
INT8 = 2e-2  # with matrices in 8 bits, on models of 32 columns


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return task_folders.recorded()


def written(tmp_path: Path, make: Callable[[Path], Folder], tensor_type: str = "auto") -> Path:
    """Convert a folder."""
    return convert(make(tmp_path / "folder").write(), tmp_path / "model.gguf", tensor_type=tensor_type)


def opened(path: Path, device: str = "cpu") -> Model:
    return Model(path, device=device, compute="f32", kv_dtype="f32")


def scores_of(model: Model, documents: list[str] = DOCUMENTS, **options: Any) -> npt.NDArray[np.float64]:
    """Return the scores in the order of the documents."""
    scores = np.empty(len(documents))
    for item in model.rerank(QUERY, documents, **options):
        scores[item.index] = item.score
    return scores


@pytest.mark.parametrize("name", RANKERS)
def test_scores_of_pairs_match_sentence_transformers(
    device: str, tmp_path: Path, record: dict[str, Any], name: str
) -> None:
    with opened(written(tmp_path, RANKERS[name]), device) as model:
        ranked = model.rerank(QUERY, DOCUMENTS)
        assert [item.score for item in ranked] == sorted((item.score for item in ranked), reverse=True)
        np.testing.assert_allclose(scores_of(model), record["ranks"][name], rtol=0, atol=NEAR[device] * 4)


def test_8_bit_products_stay_near_the_scores(tmp_path: Path, record: dict[str, Any]) -> None:
    with Model(written(tmp_path, RANKERS["xlm-roberta"], "Q8_0"), device="cpu") as model:
        np.testing.assert_allclose(scores_of(model), record["ranks"]["xlm-roberta"], rtol=0, atol=INT8)


def test_a_pair_has_the_same_score_alone_and_in_any_batch(tmp_path: Path) -> None:
    path = written(tmp_path, RANKERS["bert"], "Q8_0")
    with Model(path, device="cpu") as model, Model(path, device="cpu", threads=1) as one:
        together = scores_of(model)
        for i, document in enumerate(DOCUMENTS):
            assert scores_of(one, [document])[0] == together[i]
        np.testing.assert_array_equal(scores_of(model, DOCUMENTS[::-1])[::-1], together)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_match_transformers(device: str, tmp_path: Path, record: dict[str, Any], name: str) -> None:
    expected = record["classes"][name]
    with opened(written(tmp_path, CLASSIFIERS[name]), device) as model:
        for inputs, key in ((TEXTS, "texts"), (PAIRS, "pairs")):
            found = model.classify(inputs)
            np.testing.assert_allclose(
                found.probabilities, expected[key]["probabilities"], rtol=0, atol=NEAR[device]
            )
            np.testing.assert_allclose(
                found.log_likelihoods, expected[key]["logits"], rtol=0, atol=10 * NEAR[device]
            )
            best = np.argmax(expected[key]["probabilities"], axis=1)
            assert found.best == [found.labels[i] for i in best]


def trimmed(text: str, entity: dict[str, Any]) -> tuple[str, int, int]:
    """Return label and position of a recorded entity without white space at its ends."""
    inside = text[entity["start"] : entity["end"]]
    start = entity["start"] + len(inside) - len(inside.lstrip())
    return entity["label"], start, start + len(inside.strip())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TAGGERS)
def test_entities_match_transformers(
    tmp_path: Path, record: dict[str, Any], name: str, strategy: str
) -> None:
    with opened(written(tmp_path, TAGGERS[name])) as model:
        found = model.label_tokens(TEXTS, strategy=strategy)
        assert len(found) == len(TEXTS)
        for text, entities, expected in zip(TEXTS, found, record["labels"][name][strategy], strict=True):
            places = [(entity.label, entity.start, entity.end) for entity in entities]
            wanted = [trimmed(text, entity) for entity in expected]
            assert places == [place for place in wanted if place[1] < place[2]]
            scores = [e["score"] for e, place in zip(expected, wanted, strict=True) if place[1] < place[2]]
            np.testing.assert_allclose(
                [entity.score for entity in entities], scores, rtol=0, atol=NEAR["cpu"]
            )
            assert all(text[entity.start : entity.end] == entity.text for entity in entities)


def test_labels_on_metal_match_transformers(tmp_path: Path, record: dict[str, Any]) -> None:
    with opened(written(tmp_path, TAGGERS["bert"]), "metal") as model:
        for entities, expected in zip(
            model.label_tokens(TEXTS, strategy="none"), record["labels"]["bert"]["none"], strict=True
        ):
            scores = [entity["score"] for entity in expected]
            np.testing.assert_allclose(
                [entity.score for entity in entities], scores, rtol=0, atol=NEAR["metal"]
            )


def test_labels_are_the_same_alone_and_in_any_batch(tmp_path: Path) -> None:
    path = written(tmp_path, TAGGERS["bert"], "Q8_0")
    counts: list[tuple[int, int]] = []
    with Model(path, device="cpu") as model, Model(path, device="cpu", threads=1) as one:
        together = model.label_tokens(TEXTS, progress=lambda done, total: counts.append((done, total)))
        assert together == [one.label_tokens([text])[0] for text in TEXTS]
        assert model.label_tokens(["", *TEXTS]) == [[], *together]
    assert counts == [(i, len(TEXTS)) for i in range(1, len(TEXTS) + 1)]


def test_words_end_at_white_space(tmp_path: Path) -> None:
    with opened(written(tmp_path, TAGGERS["modernbert"])) as model:
        text = "ab c\td\ne"
        words = []
        for span in model.tokenizer.encode_spans(text):
            if not model.tokenizer.continues_word(span, text):
                words.append("")
            words[-1] += text[span.start : span.end]
        assert [word.strip() for word in words if word.strip()] == ["ab", "c", "d", "e"]


def test_ignored_labels_are_omitted(tmp_path: Path) -> None:
    with opened(written(tmp_path, TAGGERS["bert"])) as model:
        everything = [e for entities in model.label_tokens(TEXTS, ignore=()) for e in entities]
        assert {entity.label for entity in everything} == {"O", "PER", "LOC"}
        kept = [e for entities in model.label_tokens(TEXTS, ignore=("O", "PER")) for e in entities]
        assert kept == [entity for entity in everything if entity.label == "LOC"]


def test_scores_of_late_interaction_match_sentence_transformers(
    device: str, tmp_path: Path, record: dict[str, Any]
) -> None:
    expected, documents = record["late"], [text for text in DOCUMENTS if text]
    with opened(written(tmp_path, task_folders.late_interaction), device) as model:
        query = model.embed([QUERY], instruction="query")[0]
        np.testing.assert_allclose(query, expected["query"], rtol=0, atol=4 * NEAR[device])
        document = model.embed([DOCUMENTS[0]], instruction="document")[0]
        kept = document[[i for i, row in enumerate(document) if near_any(row, expected["document"], device)]]
        assert len(kept) == len(document) - 1 == len(expected["document"])  # without the full stop
        for options in ({}, {"how": "late"}):
            scores = scores_of(model, documents, **options)
            np.testing.assert_allclose(scores, expected["scores"], rtol=2e-6 if device == "cpu" else 2e-3)


def near_any(row: npt.NDArray[Any], rows: list[list[float]], device: str) -> bool:
    return bool((np.abs(np.array(rows) - row).max(axis=1) < 4 * NEAR[device]).any())


def test_late_interaction_works_without_a_projection(tmp_path: Path) -> None:
    folder = model_folders.bert(tmp_path / "m")
    folder.pool()
    with opened(convert(folder.write(), tmp_path / "m.gguf")) as model:
        query, *documents = model.embed([QUERY, *DOCUMENTS], pooling="none")
        expected = [(query @ rows.T).max(axis=1).sum() for rows in documents]
        np.testing.assert_allclose(scores_of(model, how="late"), expected, rtol=1e-6)
        with pytest.raises(ValueError, match="is an encoder without a classification head: it does not rank"):
            model.rerank(QUERY, DOCUMENTS)


def test_token_vectors_are_projected_and_truncated(tmp_path: Path) -> None:
    with opened(written(tmp_path, task_folders.late_interaction)) as model:
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


@pytest.mark.parametrize("kind", ["pair", "text", "late"])
def test_long_texts_are_rejected_or_truncated(tmp_path: Path, kind: str) -> None:
    make = {"pair": RANKERS["bert"], "text": TAGGERS["bert"], "late": task_folders.late_interaction}[kind]
    long = "the king is dead " * 30
    with opened(written(tmp_path, make)) as model:

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
            with pytest.raises(ContextOverflowError, match="leaves no room for the second"):
                model.rerank(long, ["a"], truncate="end")
            # The tokens at the end stay, and so does the query.
            frame, encode = model.tokenizer.frame, model.tokenizer.encode
            first = encode(QUERY, add_bos=False)
            room = 40 - len(first) - frame.pair_tokens
            with pytest.warns(UserWarning, match="1 of 1"):
                cut = model.rerank(QUERY, [long], truncate="end")[0].score
            shorter = model.tokenizer.decode(encode(long, add_bos=False)[:room])
            assert model.rerank(QUERY, [shorter])[0].score == cut


def test_options_unsupported_by_the_model_are_rejected(tmp_path: Path) -> None:
    pairs = written(tmp_path / "pairs", RANKERS["bert"])
    tags = written(tmp_path / "tags", TAGGERS["bert"])
    late = written(tmp_path / "late", task_folders.late_interaction)
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


def test_pairs_require_an_encoder(demo: Model) -> None:
    with pytest.raises(ValueError, match="has no classification head"):
        demo.classify([("a", "b")])


def test_generating_methods_name_the_alternatives(tmp_path: Path) -> None:
    from metal_prefill import Conversation, Scheduler

    folder = model_folders.bert(tmp_path / "m")
    folder.pool()
    plain = convert(folder.write(), tmp_path / "plain.gguf")
    for path, use in (
        (plain, "embed"),
        (written(tmp_path / "pairs", RANKERS["bert"]), "rerank or classify"),
        (written(tmp_path / "tags", TAGGERS["bert"]), "label_tokens"),
        (written(tmp_path / "late", task_folders.late_interaction), "embed, or rerank"),
    ):
        with opened(path) as model, model.session() as session:
            message = f"is an encoder, which does not generate or score text: use {use}$"
            for call in (
                lambda: model.generate("a"),
                lambda: list(model.generate("a", n=2)),
                lambda: list(model.stream("a")),
                lambda: list(session.generate("a")),
                lambda: list(model.generate_many(["a"])),
                lambda: model.generate_beams("a"),
                lambda: Conversation(model),
                lambda: Scheduler(model).submit("a"),
            ):
                with pytest.raises(ValueError, match=message):
                    call()
            assert session.position == model.position == 0


@pytest.mark.parametrize("command", ["run", "chat", "perplexity"])
def test_generating_commands_print_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = written(tmp_path, TAGGERS["bert"])
    (tmp_path / "text").write_text("a b c d e f g h")
    arguments = {"run": ["-p", "a"], "chat": [], "perplexity": ["-f", str(tmp_path / "text")]}[command]
    assert main([command, "-m", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert (
        error == "error: model.gguf is an encoder, which does not generate or score text: use label_tokens\n"
    )


def test_a_text_benchmark_names_the_embedding_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, TAGGERS["bert"])
    assert main(["bench", "-m", str(path)]) == 2
    expected = "error: model.gguf is an encoder, which does not generate text: measure --embed\n"
    assert capsys.readouterr().err == expected


def test_a_command_prints_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "tags", TAGGERS["bert"])
    file = tmp_path / "texts"
    file.write_text("\n".join(["Angela met the Queen.", "nothing"]))
    with opened(path) as model:
        expected = model.label_tokens(["Angela met the Queen.", "nothing"], strategy="first")
    arguments = ["label", "-m", str(path), "-f", str(file), "--compute", "f32", "--kv-dtype", "f32"]
    assert main([*arguments, "--strategy", "first"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{i}:{e.start}-{e.end}  {e.label}  {e.score:.4f}  {e.text}"
        for i, entities in enumerate(expected)
        for e in entities
    ]
    assert main([*arguments, "--strategy", "first", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert lines[0]["entities"][0]["text"] == expected[0][0].text


def test_a_command_prints_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, CLASSIFIERS["bert"])
    file = tmp_path / "texts"
    file.write_text("good\nbad\n")
    with Model(path, device="cpu") as model:
        found = model.classify(["good", "bad"])
    assert main(["label", "-m", str(path), "-f", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{i}  {label}  {values.max():.4f}  {text}"
        for i, (label, values, text) in enumerate(
            zip(found.best, found.probabilities, ["good", "bad"], strict=True)
        )
    ]
    assert main(["label", "-m", str(path), "-f", str(file), "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert line["label"] == found.best[0]
    assert sum(line["probabilities"].values()) == pytest.approx(1)


def test_a_command_ranks_by_late_interaction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, task_folders.late_interaction)
    file = tmp_path / "texts"
    file.write_text("The king is dead.\nx\n")
    assert main(["rerank", "-m", str(path), "-q", QUERY, "-f", str(file), "--how", "late", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with Model(path, device="cpu") as model:
        assert [line["score"] for line in lines] == [
            item.score for item in model.rerank(QUERY, ["The king is dead.", "x"])
        ]
    assert main(["embed", "-m", str(path), "-f", str(file), "-o", str(tmp_path / "v.npy")]) == 2
    assert "has a vector for each token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cls.weight": (DIM, DIM + 1)}, r"cls\.weight has rows of 33 values, its input has 32"),
        ({"cls.bias": (DIM + 1,)}, r"cls\.bias has shape \(33,\) .*expected \(32,\) and F32"),
        ({"cls.weight": None}, r"cls\.bias requires cls\.weight"),
        ({"cls.norm.weight": (DIM - 1,)}, r"cls\.norm\.weight has shape \(31,\)"),
        ({"cls.norm.bias": (DIM,)}, r"cls\.norm\.bias requires cls\.norm\.weight"),
        ({"cls.output.weight": (3, DIM - 1)}, r"cls\.output\.weight has rows of 31 values, its input has 32"),
        ({"cls.output.weight": None}, r"cls\.\w+(\.\w+)? requires cls\.output\.weight"),
        ({"cls.output.bias": (2,)}, r"cls\.output\.bias has shape \(2,\)"),
        ({"cls.output.weight": (3, DIM, 2)}, r"cls\.output\.weight has shape"),
    ],
)
def test_mismatched_heads_are_rejected(
    tmp_path: Path, changed: dict[str, tuple[int, ...] | None], message: str
) -> None:
    shapes: dict[str, tuple[int, ...] | None] = {
        "cls.weight": (DIM, DIM),
        "cls.bias": (DIM,),
        "cls.output.weight": (3, DIM),
        "cls.output.bias": (3,),
        **changed,
    }
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        read_head(GGUFFile(header(tmp_path, shapes)), "bert", DIM)


def header(tmp_path: Path, shapes: dict[str, tuple[int, ...] | None], **strings: Any) -> Path:
    """Write a file that contains a head alone."""
    writer = GGUFWriter(tmp_path / "head.gguf", "bert")
    for key, value in strings.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"bert.classifier.{key}", value)
    for name, shape in shapes.items():
        if shape is not None:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "head.gguf"


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ({"activation": "relu"}, "classifier.activation 'relu' is not supported; supported are softmax"),
        ({"activation": 3}, "classifier.activation has type uint32, expected string"),
        (
            {"pooling_type": 0},
            "classifier.pooling_type is none, must be the pooling whose result the head reads",
        ),
        ({"pooling_type": 4}, "classifier.pooling_type is rank"),
        ({"pooling_type": 9}, "classifier.pooling_type 9 is not supported"),
    ],
)
def test_unknown_metadata_of_a_head_is_rejected(
    tmp_path: Path, strings: dict[str, Any], message: str
) -> None:
    with pytest.raises((GGUFError, UnsupportedModelError), match=message):
        read_head(GGUFFile(header(tmp_path, {"cls.output.weight": (3, DIM)}, **strings)), "bert", DIM)


def test_gelu_uses_the_error_function() -> None:
    from math import erf

    from metal_prefill.files._pooled_head import _gelu

    x = np.linspace(-8, 8, 4001).astype(np.float32)
    expected = [value * (1 + erf(value / 2**0.5)) / 2 for value in x.astype(np.float64)]
    np.testing.assert_allclose(_gelu(x), expected, rtol=0, atol=1e-6)


def test_labels_are_the_tags_of_the_folder(tmp_path: Path) -> None:
    with GGUFFile(written(tmp_path, TAGGERS["bert"])) as gguf:
        head = read_head(gguf, "bert", DIM)
        assert (head.labels, head.pooling, head.dense) == (TAGS, "none", ())


def test_a_head_with_an_unsupported_activation_is_rejected(tmp_path: Path) -> None:
    folder = RANKERS["bert"](tmp_path / "m")
    folder.config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    with pytest.raises(UnsupportedModelError, match=r"the activation of the output is torch\.nn.*Tanh"):
        convert(with_head(folder, {}).write(), tmp_path / "m.gguf")


def test_a_text_that_fails_is_named_and_the_others_can_be_computed(tmp_path: Path) -> None:
    path = written(tmp_path, lambda folder: model_folders.bert(folder))
    with opened(path) as model:
        passes = TextPasses(model.engine)
        good, bad = np.array([1, 2, 3], np.int32), np.array([1, model.config.vocab_size], np.int32)
        with pytest.raises(ValueError, match=rf"^text 1: token id {model.config.vocab_size} at index 1 "):
            list(pooled_states(passes, "mean", [good, bad], ["text 0", "text 1"]))
        alone = list(pooled_states(passes, "mean", [good], ["text 0"]))
        assert alone[0].shape == (DIM,)
        assert np.all(np.isfinite(alone[0]))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooled_states_are_those_of_all_tokens(tmp_path: Path, pooling: Any) -> None:
    path = written(tmp_path, lambda folder: model_folders.bert(folder))
    with opened(path) as model:
        passes = TextPasses(model.engine, rows=lambda: 7)  # of several passes
        texts = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 4, 1, 9, 2)]
        names = [f"text {i}" for i in range(5)]
        whole = list(pooled_states(passes, "none", texts, names))
        assert [len(states) for states in whole] == [3, 4, 1, 9, 2]
        for states, vector in zip(whole, pooled_states(passes, pooling, texts, names), strict=True):
            expected = {"mean": states.mean(axis=0, dtype=np.float64), "cls": states[0], "last": states[-1]}
            assert np.array_equal(vector, expected[pooling].astype(np.float32))


def test_texts_fill_the_rows_of_a_pass(tmp_path: Path) -> None:
    path = written(tmp_path, lambda folder: model_folders.bert(folder))
    counts: list[int] = []
    with opened(path) as model:
        core = model.engine.core

        def run(call: Any) -> list[Any]:
            counts.append(call.rows)
            return core.forward_batch(call.take_requests())

        texts = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 4, 1, 9, 2, 5, 1)]
        passes = TextPasses(model.engine, run, rows=lambda: 7)
        assert len(list(pooled_states(passes, "mean", texts, ["text"] * 7))) == 7
    assert counts == [7, 1, 9, 7, 1]  # a longer text goes alone


@pytest.mark.parametrize(
    ("lengths", "pooling", "message"),
    [
        ([2, 2], "mean", "text 1 has 2 tokens, of 1 that are left"),
        ([2, 0], "mean", "text 1 has 0 tokens, of 1 that are left"),
        ([2, -1], "mean", "text 1 has -1 tokens, of 1 that are left"),
        ([2], "mean", "the texts have 2 tokens, but 3 were given"),
        ([3], "max", "pooling of a text is none, mean, cls or last, not 'max'"),
    ],
)
def test_texts_of_wrong_lengths_are_refused(
    tmp_path: Path, lengths: list[int], pooling: str, message: str
) -> None:
    path = written(tmp_path, lambda folder: model_folders.bert(folder))
    with opened(path) as model, pytest.raises(ValueError, match=re.escape(message)):
        model.engine.core.text_requests(np.zeros(3, np.int32), np.array(lengths, np.int32), pooling)


def test_a_damaged_vocabulary_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, lambda folder: model_folders.bert(folder))
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
