"""Vectors of texts: pooling, ends, cuts and prompts as files and cards define them, alone or together."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.closeness import hidden_states, lowest_cosine
from support.computed_tokens import ComputedTokens
from support.files.gguf_bytes import FALSE, integer
from support.files.gguf_mutator import with_entries
from support.kernels.cpu_testing import cpu_testing
from support.reference import ReferenceModel
from support.small_models import EMBEDDERS, write

from metal_prefill import ContextOverflowError, GGUFError, Model, UnsupportedModelError, _core, synth
from metal_prefill.tasks._embedding import encode_texts, encode_tokens
from metal_prefill.tasks._prompts import PromptForm, PromptRules, text_role

TEXTS = ["To be, or not to be", "a", "that is the question. " * 12, "Whether 'tis nobler", "\x00 and on", "a"]
# Cosine with the float64 reference. Metal multiplies in half precision.
NEAR = {"cpu": 1 - 1e-9, "metal": 0.9999}
INT8 = 0.999


@pytest.fixture
def model(embedder: Path) -> Iterator[Model]:
    with Model(embedder, device="cpu") as opened:
        yield opened


def tokens_of(model: Model, text: str) -> list[int]:
    """Tokens of a text as an embedding takes them: its end is marked."""
    assert model.tokenizer.eos_id is not None
    return [*model.tokenizer.encode(text), model.tokenizer.eos_id]


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_match_the_reference(device: str, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", EMBEDDERS[name])
    reference = ReferenceModel(path)
    with Model(path, device=device, compute="f32", kv_dtype="f32") as model:
        texts = TEXTS if device == "cpu" else TEXTS[:3]
        vectors = model.embed(texts)
        expected = [reference.pooled(tokens_of(model, text)) for text in texts]
    assert lowest_cosine(vectors, expected) >= NEAR[device]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3, last", "gemma-embedding"])
def test_8_bit_activations_stay_near_the_reference(tmp_path: Path, name: str) -> None:
    model = replace(EMBEDDERS[name], types={"*": "Q8_0"}, embedding="Q8_0")
    path = write(tmp_path / "model.gguf", model)
    reference = ReferenceModel(path)
    with Model(path, device="cpu") as opened:
        expected = [reference.pooled(tokens_of(opened, text)) for text in TEXTS]
        assert lowest_cosine(opened.embed(TEXTS), expected) >= INT8


@pytest.mark.parametrize("name", ["qwen3, last", "qwen3, mean", "gemma-embedding"])
def test_a_text_is_bit_identical_alone_and_in_any_batch(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", EMBEDDERS[name])
    with Model(path, device="cpu") as model, Model(path, device="cpu", threads=1, chunk_tokens=24) as cut:
        together = model.embed(TEXTS)
        alone = np.concatenate([model.embed([text]) for text in TEXTS])
        np.testing.assert_array_equal(together, alone)
        np.testing.assert_array_equal(cut.embed(TEXTS[::-1])[::-1], alone)
        np.testing.assert_array_equal(together[1], together[5])


def test_shared_prefixes_are_computed_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [model.embed([f"{'word ' * 20}{i}"])[0] for i in range(5)]
    computed = ComputedTokens(monkeypatch)
    vectors = model.embed([f"{'word ' * 20}{i}" for i in range(5)])
    lengths = [len(tokens_of(model, f"{'word ' * 20}{i}")) for i in range(5)]
    assert lengths[0] <= computed.count < lengths[0] + 5 * 16
    assert (model.position, model.stats()["kv_pool_bytes"]) == (0, 0)
    np.testing.assert_array_equal(vectors, plain)


def test_a_truncated_vector_is_normalized_again(model: Model) -> None:
    whole = model.embed(TEXTS)
    cut = model.embed(TEXTS, dimensions=16)
    assert cut.shape == (len(TEXTS), 16)
    expected = whole[:, :16] / np.linalg.norm(whole[:, :16].astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, rtol=1e-5)
    raw = model.embed(TEXTS, normalize=False)
    np.testing.assert_array_equal(model.embed(TEXTS, dimensions=16, normalize=False), raw[:, :16])


@pytest.mark.parametrize(
    ("architecture", "instruction", "whole"),
    [
        ("qwen3", "Find verses", "Instruct: Find verses\nQuery:TEXT"),
        (
            "qwen3",
            "query",
            "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"
            "Query:TEXT",
        ),
        ("qwen3", "document", "TEXT"),
        ("qwen3", "<{text}>", "<TEXT>"),
        ("gemma-embedding", "query", "task: search result | query: TEXT"),
        ("gemma-embedding", "document", "title: none | text: TEXT"),
        ("gemma-embedding", "clustering", "task: clustering | query: TEXT"),
        ("llama", "query: ", "query: TEXT"),
    ],
)
def test_instructions_are_placed_as_in_the_model_card(
    tmp_path: Path, architecture: str, instruction: str, whole: str
) -> None:
    model = next(m for m in EMBEDDERS.values() if m.architecture == architecture)
    with Model(write(tmp_path / "model.gguf", model), device="cpu") as opened:
        text = "{text} is text"
        expected = opened.embed([whole.replace("TEXT", text)])
        np.testing.assert_array_equal(opened.embed([text], instruction=instruction), expected)


@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_repeated_texts_have_the_vectors_of_the_first(model: Model, pooling: Any) -> None:
    texts = ["a", "a", "b", "c", "b", "d"]
    done: list[tuple[int, int]] = []
    vectors = model.embed(texts, pooling=pooling, progress=lambda *counts: done.append(counts))
    assert done == [(i, 4) for i in range(1, 5)]
    for text, vector in zip(texts, vectors, strict=True):
        np.testing.assert_array_equal(vector, model.embed([text], pooling=pooling)[0])


def test_a_text_without_tokens_has_a_zero_vector_and_is_named(tmp_path: Path) -> None:
    path = synth.synthesize(tmp_path / "m.gguf", preset="tiny")
    with Model(path, device="cpu") as model:
        assert (model.tokenizer.add_bos, model.tokenizer.add_eos) == (False, False)
        with pytest.warns(UserWarning, match="1 of 3 texts have no tokens, and vectors of zeros: text 1"):
            vectors = model.embed(["a", "", "b"], pooling="mean")
        assert not vectors[1].any()
        np.testing.assert_array_equal(vectors[[0, 2]], model.embed(["a", "b"], pooling="mean"))
        with pytest.warns(UserWarning, match="text 0"):
            (states,) = model.embed([""], pooling="none")
        assert states.shape == (0, 64)


def test_texts_beyond_the_context_are_truncated_on_request(embedder: Path) -> None:
    long = "a b " * 40
    with Model(embedder, device="cpu", max_context=20) as short, Model(embedder, device="cpu") as model:
        with pytest.warns(UserWarning, match=r"2 of 3 texts did not fit .* 20 tokens .* text 0, 2"):
            vectors = short.embed([long, "a", long], truncate="end")
        kept = model.tokenizer.decode(model.tokenizer.encode(long)[:19])
        assert tokens_of(model, kept) == [*model.tokenizer.encode(long)[:19], model.tokenizer.eos_id]
        np.testing.assert_array_equal(vectors, model.embed([kept, "a", kept]))
        with pytest.raises(ContextOverflowError, match=r"text 1: \d+ tokens exceed the context of 20"):
            short.embed(["a", long])
        with pytest.raises(ValueError, match="truncate must be"):
            short.embed(["a"], truncate="start")


def test_truncation_keeps_the_tokens_after_the_text(embedder: Path) -> None:
    long, form = "a b, " * 40, "q: {text} => one word"
    with Model(embedder, device="cpu", max_context=24) as short, Model(embedder, device="cpu") as model:

        def fits(text: str) -> bool:  # with the token that ends texts
            return len(model.tokenizer.encode(form.replace("{text}", text))) + 1 <= 24

        kept = max((long[:n] for n in range(len(long)) if fits(long[:n])), key=len)
        assert len(kept) > 5
        with pytest.warns(UserWarning, match=r"1 of 2 texts did not fit .* 24 tokens .* text 1"):
            vectors = short.embed(["a", long], instruction=form, truncate="end")
        np.testing.assert_array_equal(vectors, model.embed(["a", kept], instruction=form))
        with pytest.raises(ContextOverflowError, match=r"text 0: \d+ tokens exceed the context of 24"):
            short.embed([""], instruction="{text}" + long, truncate="end")


@pytest.mark.parametrize("form", ["{text}", "q: {text} => one word"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-embedding"])  # the second has a token that ends texts
def test_texts_are_encoded_together_as_each_alone(tmp_path: Path, preset: str, form: str) -> None:
    path = synth.synthesize(tmp_path / "m.gguf", preset=preset)
    texts = ["a", "", "a b " * 40, "", *("x" * n for n in range(1, 60)), ""]
    with Model(path, device="cpu", max_context=20) as model:
        engine, rules = model.engine, PromptRules("end")
        before, _, after = form.partition("{text}")
        role = text_role(engine, PromptForm(before, after))
        together = encode_texts(engine, texts, role, rules)
        made = [role.form.tokens(engine.tokenizer, text, rules) for text in texts]
        alone = [
            encode_tokens(engine, ids, text, "text", role, rules)
            for ids, text in zip(made, texts, strict=True)
        ]
        assert [ids.tolist() for ids in together.prompts] == [text.ids for text in alone]
        assert together.cut == [i for i, text in enumerate(alone) if text.cut]
        assert together.empty == [i for i, text in enumerate(alone) if not text.ids]
        assert len(together.cut) > 1
        assert len(together.empty) == (3 if (preset, form) == ("tiny", "{text}") else 0)


def test_texts_of_a_bidirectional_model_are_not_split(device: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", EMBEDDERS["gemma-embedding"])
    with Model(path, device=device, chunk_tokens=16) as model:
        session = model.session()
        session.forward_prompt(range(40))
        with pytest.raises(ValueError, match="a text goes in whole, into an empty session"):
            session.forward_prompt([1, 2])
        assert session.position == 40
        with pytest.raises(ValueError, match="a text goes in whole"):
            model.forward_prompt([1, 2], reuse=True)


def test_a_contradictory_file_is_rejected(tmp_path: Path) -> None:
    whole, path = write(tmp_path / "whole.gguf", EMBEDDERS["gemma-embedding"]), tmp_path / "m.gguf"
    path.write_bytes(whole.read_bytes().replace(b"dense_3.weight", b"dense_3.wrongs"))
    with pytest.raises(GGUFError, match=r"dense_3_feat_in and _out declare .* dense_3.weight is missing"):
        Model(path, device="cpu")
    for number, error, message in (
        (7, UnsupportedModelError, "pooling_type 7 is not supported; supported are 0 .none., 1 .mean."),
        (4, GGUFError, "pooling_type is rank, but tensor cls.output.weight is missing"),
    ):
        with_entries(path, whole, {"gemma-embedding.pooling_type": integer(number)})
        with pytest.raises(error, match=message):
            Model(path, device="cpu")
    Model(with_entries(path, whole, {"gemma-embedding.dense_2_feat_out": None}), device="cpu").close()
    with_entries(path, whole, dict.fromkeys(f"gemma-embedding.dense_2_feat_{end}" for end in ("in", "out")))
    path.write_bytes(path.read_bytes().replace(b"dense_2.weight", b"dense_2.wrongs"))
    with pytest.raises(GGUFError, match=r"tensor dense_3.weight requires dense_2.weight, which is missing"):
        Model(path, device="cpu")


def test_the_end_of_a_text_is_marked_if_the_file_requires_it(embedder: Path, tmp_path: Path) -> None:
    without = with_entries(tmp_path / "m.gguf", embedder, {"tokenizer.ggml.add_eos_token": FALSE})
    with Model(embedder, device="cpu") as ends, Model(without, device="cpu") as open_:
        assert not np.array_equal(ends.embed(["a"]), open_.embed(["a"]))
        state = hidden_states(open_, np.array(tokens_of(ends, "a")))[-1]
        np.testing.assert_array_equal(ends.embed(["a"], normalize=False)[0], state)


WIDTHS = [1, 7, 8, 9, 100, 127, 128, 129, 136, 300, 384, 1000, 8193]


@pytest.mark.parametrize("width", WIDTHS)
def test_squares_are_added_in_the_order_of_numpy(width: int) -> None:
    """Few vectors show it once they are in float32, but those of all versions are the same."""
    sum_of_squares = cpu_testing().sum_of_squares
    for row in np.random.default_rng(width).normal(0, 3, (50, width)).astype(np.float32):
        assert sum_of_squares(row) == np.add.reduce(np.square(row, dtype=np.float64))


@pytest.mark.parametrize("width", WIDTHS)
def test_normalized_vectors_have_the_bits_of_numpy(width: int) -> None:
    vectors = np.random.default_rng(width).normal(0, 3, (20, width)).astype(np.float32)
    vectors[0] = 0
    vectors[1] = 1e-45  # the smallest number above 0
    vectors[2] = np.finfo(np.float32).max
    squares = np.square(vectors, dtype=np.float64)
    length = np.sqrt(np.add.reduce(squares, axis=-1, keepdims=True))
    expected = (vectors / np.maximum(length, np.finfo(np.float64).tiny)).astype(np.float32)
    _core.normalize(vectors)
    np.testing.assert_array_equal(vectors, expected)
    np.testing.assert_allclose(np.linalg.norm(vectors[1:].astype(np.float64), axis=1), 1, rtol=1e-6)
    assert not vectors[0].any()
