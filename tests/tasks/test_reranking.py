"""Reranking and classification: heads, answers and likelihoods against the float64 reference."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.computed_tokens import ComputedTokens
from support.kernels.float64 import softmax
from support.reference import ReferenceModel
from support.small_models import CLASSIFIERS, EMBEDDERS, write

from metal_prefill import ContextOverflowError, Model, _core
from metal_prefill.tasks._reranking import encode_template

QUERY = "who is the king"
DOCUMENTS = ["The king is dead.", "A rose by any other name", "Long live the king! " * 8, "x"]
TEMPLATE = "q {query} d {document} ?"
GENERATIVE = replace(EMBEDDERS["qwen3, last"], pooling=None, vocab=2048)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose classes are yes and no."""
    return write(tmp_path_factory.mktemp("m") / "yes.gguf", CLASSIFIERS["qwen3, yes and no"])


@pytest.fixture
def model(reranker: Path) -> Iterator[Model]:
    with Model(reranker, device="cpu", compute="f32", kv_dtype="f32") as opened:
        yield opened


def filled(model: Model, document: str) -> list[int]:
    return model.tokenizer.encode(TEMPLATE.replace("{query}", QUERY).replace("{document}", document))


@pytest.mark.parametrize("name", ["qwen3, yes and no", "qwen3, one class"])
def test_scores_match_the_classes(device: str, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "m.gguf", CLASSIFIERS[name])
    reference = ReferenceModel(path)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        ranked = model.rerank(QUERY, DOCUMENTS, template=TEMPLATE)
        assert sorted(r.index for r in ranked) == [0, 1, 2, 3]
        assert [r.score for r in ranked] == sorted((r.score for r in ranked), reverse=True)
        for item in ranked:
            assert item.document == DOCUMENTS[item.index]
            logits = reference.pooled(filled(model, item.document))
            expected = logits[0] if len(logits) == 1 else 1 / (1 + np.exp(logits[1] - logits[0]))
            assert item.score == pytest.approx(expected, abs=1e-4 if device == "cpu" else 1e-2)


def test_yes_and_no_are_found_in_any_order(tmp_path: Path, model: Model) -> None:
    turned = write(tmp_path / "m.gguf", replace(CLASSIFIERS["qwen3, yes and no"], labels=("no", "yes")))
    with Model(turned, device="cpu", compute="f32", kv_dtype="f32") as other:
        for a in model.rerank(QUERY, DOCUMENTS, template=TEMPLATE):
            b = next(r for r in other.rerank(QUERY, DOCUMENTS, template=TEMPLATE) if r.index == a.index)
            assert a.score + b.score == pytest.approx(1)


def test_a_generative_reranker_compares_yes_with_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", GENERATIVE)
    with Model(path, device="cpu", compute="f32", kv_dtype="f32") as model:
        encode = model.tokenizer.encode
        ids = {"yes": [700], "no": [300]}
        monkeypatch.setattr(
            model.tokenizer, "encode", lambda text, **options: ids.get(text) or encode(text, **options)
        )
        for output in ("logits", "greedy", "log_probs"):  # a request for hidden states needs no whole head
            monkeypatch.delattr(_core.Request, output)
        ranked = model.rerank(QUERY, DOCUMENTS, template=TEMPLATE)
        reference = ReferenceModel(path)
        for item in ranked:
            logits = reference.forward(filled(model, item.document)).logits[-1]
            assert item.score == pytest.approx(1 / (1 + np.exp(logits[300] - logits[700])), abs=1e-4)


def test_the_query_is_computed_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    query = "who is the king " * 20
    alone = [model.rerank(query, [d], template=TEMPLATE)[0].score for d in DOCUMENTS]
    computed = ComputedTokens(monkeypatch)
    ranked = model.rerank(query, DOCUMENTS, template=TEMPLATE)
    lengths = [len(model.tokenizer.encode(text)) for text in (query, *DOCUMENTS)]
    assert sum(lengths) <= computed.count < sum(lengths) + 20 * len(DOCUMENTS)
    assert [alone[r.index] for r in ranked] == [r.score for r in ranked]  # bit for bit
    assert model.stats()["kv_pool_bytes"] == 0


def test_only_the_best_are_returned(model: Model) -> None:
    ranked = model.rerank(QUERY, DOCUMENTS, template=TEMPLATE)
    assert model.rerank(QUERY, DOCUMENTS, 2, template=TEMPLATE) == ranked[:2]
    assert model.rerank(QUERY, DOCUMENTS, 99, template=TEMPLATE) == ranked
    assert model.rerank(QUERY, [], template=TEMPLATE) == []


def test_texts_cannot_contain_control_tokens_or_placeholders(model: Model) -> None:
    template = "<|endoftext|>{query}|{document}"
    ids = encode_template(model.engine, template, {"query": "{document}", "document": "<|endoftext|>"})
    (special,) = model.tokenizer.encode("<|endoftext|>", parse_special=True)
    assert ids.tolist() == [special, *model.tokenizer.encode("{document}|<|endoftext|>", add_bos=False)]


def test_documents_beyond_the_context_are_truncated_on_request(reranker: Path) -> None:
    long = "a b, " * 60
    with Model(reranker, device="cpu", max_context=40) as short, Model(reranker, device="cpu") as whole:
        kept = max((long[:n] for n in range(200) if len(filled(whole, long[:n])) <= 40), key=len)
        assert len(kept) > 5
        with pytest.warns(UserWarning, match=r"1 of 2 documents did not fit .* 40 tokens .* document 1"):
            ranked = short.rerank(QUERY, ["x", long], template=TEMPLATE, truncate="end")
        expected = {item.index: item.score for item in whole.rerank(QUERY, ["x", kept], template=TEMPLATE)}
        assert {item.index: item.score for item in ranked} == expected
        assert {item.document for item in ranked} == {"x", long}
        with pytest.raises(ContextOverflowError, match=r"document 0: \d+ tokens exceed the context of 40"):
            short.rerank(long, ["x"], template=TEMPLATE, truncate="end")  # the query is never truncated
        with pytest.raises(ValueError, match="truncate must be one of error, end; got 'start'"):
            short.rerank(QUERY, ["x"], template=TEMPLATE, truncate="start")


def test_classes_match_the_head(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", CLASSIFIERS["qwen3, three classes"])
    reference = ReferenceModel(path)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        found = model.classify(DOCUMENTS)
        assert found.labels == ("low", "middle", "high")
        for i, text in enumerate(DOCUMENTS):
            logits = reference.pooled([*model.tokenizer.encode(text), 0])  # ends with <|endoftext|>
            expected = softmax(logits)
            np.testing.assert_allclose(
                found.probabilities[i], expected, atol=1e-4 if device == "cpu" else 1e-2
            )
            assert found.best[i] == found.labels[int(expected.argmax())]


def test_texts_beyond_the_context_of_a_head_are_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", CLASSIFIERS["qwen3, three classes"])
    long = "a b " * 40
    with Model(path, device="cpu", max_context=20) as short, Model(path, device="cpu") as model:
        with pytest.warns(UserWarning, match=r"1 of 2 texts did not fit .* 20 tokens .* text 0"):
            found = short.classify([long, "x"], truncate="end")
        kept = model.tokenizer.decode(model.tokenizer.encode(long)[:19])  # and the token that ends texts
        np.testing.assert_array_equal(found.log_likelihoods, model.classify([kept, "x"]).log_likelihoods)


def test_a_text_without_tokens_has_no_class_of_a_head(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", CLASSIFIERS["qwen3, three classes"])
    with Model(path, device="cpu") as model:
        model.tokenizer.frame = model.tokenizer.frame._replace(end=())  # which would be the only token
        with pytest.raises(ValueError, match="text 1 has no tokens"):
            model.classify(["a", ""])


LABELS = ["dead", "alive and well", "x"]


def likelihood(model: Model, reference: ReferenceModel, text: str, label: str) -> tuple[float, int]:
    """Sum over the tokens of a label, in float64, and their number."""
    whole = model.tokenizer.encode(f"{text} is {label}")
    before = len(model.tokenizer.encode(f"{text} is"))
    return float(reference.forward(whole).log_probs(whole)[before - 1 :].sum()), len(whole) - before


def test_label_probabilities_match_the_reference(device: str, fast_demo_path: Path) -> None:
    reference = ReferenceModel(fast_demo_path)
    texts = ["The king", "ROMEO:\nBut soft, what light"]
    with Model(fast_demo_path, device=device, compute="f32", kv_dtype="f32") as model:
        pairs = [likelihood(model, reference, text, label) for text in texts for label in LABELS]
        expected, lengths = (np.array(column).reshape(2, 3) for column in zip(*pairs, strict=True))
        for normalize_length in (True, False):
            found = model.classify(texts, LABELS, "{text} is {label}", normalize_length=normalize_length)
            np.testing.assert_allclose(found.log_likelihoods, expected, rtol=1e-6, atol=1e-2)
            np.testing.assert_array_equal(found.lengths, lengths)
            probabilities = softmax(expected / lengths if normalize_length else expected)
            np.testing.assert_allclose(found.probabilities, probabilities, atol=5e-3)
            assert found.labels == tuple(LABELS)


def test_the_same_text_twice_has_the_same_labels(bundled: Model) -> None:
    found = bundled.classify(["The king", "ROMEO:", "The king"], LABELS, "{text} is {label}")
    np.testing.assert_array_equal(found.log_likelihoods[0], found.log_likelihoods[2])


def test_calibration_divides_by_probabilities_without_content(bundled: Model) -> None:
    plain = bundled.classify(["The king", "N/A", "[MASK]", ""], LABELS)
    calibrated = bundled.classify(["The king"], LABELS, calibrate=True)
    prior = plain.probabilities[1:].astype(np.float64).mean(axis=0)
    expected = plain.probabilities[0] / prior
    np.testing.assert_allclose(calibrated.probabilities[0], expected / expected.sum(), rtol=1e-4)


def test_texts_and_templates_are_shared_prefixes(bundled: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"{'Say what it is. ' * 10}{{text}} is {{label}}"
    alone = [bundled.classify([text], LABELS, template) for text in DOCUMENTS]
    computed = ComputedTokens(monkeypatch)
    together = bundled.classify(DOCUMENTS, LABELS, template)
    texts = sum(len(bundled.tokenizer.encode(text)) for text in DOCUMENTS)
    labels = sum(len(bundled.tokenizer.encode(label)) for label in LABELS)
    beginning = len(bundled.tokenizer.encode(template.split("{text}")[0]))
    assert beginning + texts <= computed.count < beginning + texts + len(DOCUMENTS) * (labels + 16)
    for i, one in enumerate(alone):
        np.testing.assert_array_equal(together.log_likelihoods[i], one.log_likelihoods[0])


def test_texts_with_labels_beyond_the_context_are_truncated(demo_path: Path) -> None:
    long, template = "a b, " * 40, "{text} => is {label}"
    with Model(demo_path, device="cpu", max_context=24) as short, Model(demo_path, device="cpu") as model:

        def fits(text: str) -> bool:  # the last token is only predicted
            encode = model.tokenizer.encode
            return all(len(encode(f"{text} => is {label}")) - 1 <= 24 for label in LABELS)

        kept = max((long[:n] for n in range(len(long)) if fits(long[:n])), key=len)
        assert len(kept) > 5
        with pytest.warns(UserWarning, match=r"1 of 2 texts did not fit .* 24 tokens .* text 1"):
            found = short.classify(["x", long], LABELS, template, truncate="end")
        expected = model.classify(["x", kept], LABELS, template)
        np.testing.assert_array_equal(found.log_likelihoods, expected.log_likelihoods)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, text, **options: model.embed([text], pooling="mean", **options)[0].tolist(),
        lambda model, text, **options: model.rerank(text, ["x"], template=TEMPLATE, **options)[0].score,
        lambda model, text, **options: model.rerank("x", [text], template=TEMPLATE, **options)[0].score,
        lambda model, text, **options: model.classify([text], **options).log_likelihoods.tolist(),
        lambda model, text, **options: model.classify([text], ["x", "y"], **options).log_likelihoods.tolist(),
        lambda model, text, **options: model.classify(["x"], [text, "y"], **options).log_likelihoods.tolist(),
    ],
    ids=["texts", "queries", "documents", "classes", "texts with labels", "labels"],
)
def test_texts_are_normalized_to_nfc_on_request(model: Model, call: Callable[..., Any]) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    expected = call(model, composed)
    assert call(model, decomposed, unicode="NFC") == expected != call(model, decomposed)


def test_labels_are_named_as_they_are_given(bundled: Model) -> None:
    assert bundled.classify(["x"], ["cafe\u0301", "x"], unicode="NFC").labels == ("cafe\u0301", "x")
