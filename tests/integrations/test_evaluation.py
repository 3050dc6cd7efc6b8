"""Requests of evaluation harnesses, next to lm-eval with transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import choice_task

from metal_prefill import Model
from metal_prefill.integrations._evaluation import (
    encode_templated,
    generate_until,
    loglikelihood,
    loglikelihood_rolling,
    rolling_windows,
)
from metal_prefill.text import Tokenizer

CONTEXT = "ROMEO:\nBut soft, what light through"


@pytest.fixture
def model(demo_path: Path) -> Iterator[Model]:
    with Model(demo_path, device="cpu", compute="f32", kv_dtype="f32") as opened:
        yield opened


def test_trailing_spaces_of_a_context_belong_to_the_continuation(model: Model) -> None:
    assert loglikelihood(model, [(CONTEXT + " ", "yonder")]) == loglikelihood(model, [(CONTEXT, " yonder")])


def test_a_context_that_is_too_long_is_truncated_at_its_start(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", max_context=16) as short, Model(demo_path, device="cpu") as model:
        whole = model.tokenizer.encode(CONTEXT * 4 + " yonder")
        context = model.tokenizer.encode(CONTEXT * 4)
        assert whole[: len(context)] == context
        added = len(whole) - len(context)
        # The last token is predicted and not read: 17 fit in a context of 16.
        scores = model.score(whole[-17:])
        ((value, _),) = loglikelihood(short, [(CONTEXT * 4, " yonder")])
        assert value == pytest.approx(float(scores[-added:].sum(dtype=np.float64)), rel=1e-12)
        with pytest.raises(ValueError, match=r"request 0: a continuation of \d+ tokens does not fit"):
            loglikelihood(short, [("a", " word" * 100)])


@pytest.mark.parametrize(("bos", "eos", "start"), [(7, 9, 7), (None, 9, 9), (7, None, 7)])
def test_the_first_token_follows_the_one_that_begins_or_else_ends_texts(
    bos: int | None, eos: int | None, start: int
) -> None:
    tokenizer = SimpleNamespace(bos_id=bos, eos_id=eos, encode=lambda text, add_bos: [1, 2])
    model: Any = SimpleNamespace(tokenizer=tokenizer, max_context=10)
    assert [(a.tolist(), b.tolist()) for a, b in rolling_windows(model, "text")] == [([start], [1, 2])]


@pytest.mark.parametrize("tokens", [1, 9, 10, 11, 19, 20, 21, 34])
def test_windows_match_the_harness(demo_path: Path, tokens: int) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    with Model(demo_path, device="cpu", max_context=10) as short:
        start = short.tokenizer.bos_id if short.tokenizer.bos_id is not None else short.tokenizer.eos_id
        text = short.tokenizer.decode(short.tokenizer.encode(CONTEXT * 10, add_bos=False)[:tokens])
        ids = short.tokenizer.encode(text, add_bos=False)
        assert len(ids) == tokens
        windows = utils.get_rolling_token_windows(ids, start, 10, 1)
        expected = [utils.make_disjoint_window(window) for window in windows]
        assert [(a.tolist(), b.tolist()) for a, b in rolling_windows(short, text)] == expected


def test_a_prompt_that_leaves_no_room_is_truncated_at_its_start(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", max_context=16) as short, Model(demo_path, device="cpu") as model:
        ids = model.tokenizer.encode(CONTEXT * 4)
        expected = "".join(model.generate(ids[-10:], 6))
        assert expected != "".join(model.generate(ids[:10], 6))
        assert generate_until(short, [(CONTEXT * 4, 6, ())]) == [expected]


CHAT = [{"role": "user", "content": "Who is Romeo?"}]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give files a template that writes the BOS token, as their tokenizers do."""
    monkeypatch.setattr(Tokenizer, "_template_source", lambda self, key: TEMPLATE)


@pytest.mark.usefixtures("chat_template")
def test_texts_of_a_chat_template_are_encoded_with_its_tokens(model: Model) -> None:
    tokenizer = model.tokenizer
    begin, end = tokenizer.bos_id, tokenizer.eos_id
    assert tokenizer.add_bos
    assert begin is not None
    assert end is not None
    ids = [begin, *tokenizer.encode("user: Who is Romeo?", add_bos=False), end]
    ids += tokenizer.encode("assistant:", add_bos=False)
    text = "<|endoftext|>user: Who is Romeo?<|endoftext|>assistant:"
    assert encode_templated(tokenizer, text) == ids
    assert encode_templated(tokenizer, text.removeprefix("<|endoftext|>")) == ids
    answer = tokenizer.encode(" A lover", add_bos=False)
    ((value, _),) = loglikelihood(model, [(text, " A lover")], templated=True)
    scores = model.score([*ids, *answer])
    assert value == pytest.approx(float(scores[-len(answer) :].sum(dtype=np.float64)), rel=1e-6)
    assert generate_until(model, [(text, 6, ())], templated=True) == ["".join(model.generate(ids, 6))]


@pytest.mark.usefixtures("chat_template")
def test_the_harness_applies_the_chat_template(demo_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from metal_prefill.integrations import MetalPrefillLM

    lm = MetalPrefillLM(str(demo_path), device="cpu")
    assert lm.chat_template(True) == TEMPLATE
    text = lm.apply_chat_template(CHAT)
    assert text == "<|endoftext|>user: Who is Romeo?<|endoftext|>assistant: "
    begun = lm.apply_chat_template(
        [*CHAT, {"role": "assistant", "content": "He is "}], add_generation_prompt=False
    )
    assert begun == "<|endoftext|>user: Who is Romeo?<|endoftext|>assistant: He is"
    requests = [Instance("generate_until", {}, (text, {"max_gen_toks": 6}), 0)]
    expected = "".join(lm.model.generate(lm.model.tokenizer.apply_chat_template(CHAT), 6))
    assert lm.generate_until(requests) == [expected]
    with pytest.raises(ValueError, match="takes no name, got 'tool_use'"):
        lm.chat_template("tool_use")


def test_generation_ends_at_stop_strings_and_the_token_limit(model: Model) -> None:
    whole = "".join(model.generate(CONTEXT, 20))
    stop = whole[6:9]
    found = generate_until(model, [(CONTEXT, 20, ()), (CONTEXT, 20, (stop,)), (CONTEXT, 3, ())])
    assert found[0] == whole
    assert found[1] == whole[: whole.index(stop)]
    assert whole.startswith(found[2])


def test_the_harness_finds_the_model(demo_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import metal_prefill.lm_eval  # noqa: F401

    lm = get_model("metal-prefill")(path=str(demo_path), device="cpu")
    requests = [Instance("loglikelihood", {}, (CONTEXT, text), 0) for text in (" yonder", " the")]
    assert lm.loglikelihood(requests) == loglikelihood(lm.model, [r.args for r in requests])


def test_likelihoods_match_transformers(tmp_path: Path) -> None:
    """tools/record/likelihoods.py records those of lm-eval's backend hf."""
    recorded = json.loads(choice_task.FILE.read_text(encoding="utf-8"))["requests"]
    with Model(choice_task.model(tmp_path), device="cpu", compute="f32", kv_dtype="f32") as model:
        found = loglikelihood(model, [(context, continuation) for context, continuation, _, _ in recorded])
    likelihoods, greedy = zip(*found, strict=True)
    assert likelihoods == pytest.approx([value for _, _, value, _ in recorded], abs=1e-3)
    assert list(greedy) == [is_greedy for _, _, _, is_greedy in recorded]
    assert greedy.count(True) == 1


@pytest.mark.parametrize(
    ("asked", "expected"), [("cpu", "cpu"), ("metal", "metal"), ("cuda:0", "auto"), (None, "auto")]
)
def test_the_harness_can_select_the_device(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: str
) -> None:
    """It passes cuda:0 if its user names none."""
    pytest.importorskip("lm_eval")
    from metal_prefill.integrations import _lm_eval

    opened: list[dict[str, object]] = []
    monkeypatch.setattr(_lm_eval, "Model", lambda path, **options: opened.append(options))
    _lm_eval.MetalPrefillLM(None, device=asked, threads=3)
    assert opened == [{"device": expected, "threads": 3}]


def test_likelihoods_of_long_texts_match_transformers(tmp_path: Path) -> None:
    """Texts have up to several contexts; they are recorded as above."""
    recorded = json.loads(choice_task.FILE.read_text(encoding="utf-8"))["rolling"]
    with Model(choice_task.model(tmp_path), device="cpu", compute="f32", kv_dtype="f32") as model:
        lengths = [len(model.tokenizer.encode(text, add_bos=False)) for text in choice_task.TEXTS]
        assert max(lengths) > 2 * model.max_context
        assert loglikelihood_rolling(model, choice_task.TEXTS) == pytest.approx(recorded, abs=1e-2)


def test_no_requests_compute_nothing(model: Model) -> None:
    assert loglikelihood(model, []) == []
    assert loglikelihood_rolling(model, []) == []
    assert np.isfinite(loglikelihood_rolling(model, ["a"])[0])
