"""Constrained texts: they meet the constraint, and are what choosing token by token under masks makes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.sampling_reference import Drawn

from metal_prefill import ConstraintError, Conversation, MissingExtraError, Model
from metal_prefill._guide import Guide
from metal_prefill.sampling import REPEAT_WINDOW, sample

pytest.importorskip("llguidance", reason="needs the extra guide")
pytest.importorskip("jsonschema", reason="checks texts with jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["king", "queen", "fool"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
PROMPT = "A person of the play: "


@pytest.fixture(scope="module")
def model(demo_path: Path) -> Iterator[Model]:
    """Open the bundled model, whose vocabulary has 1,024 tokens."""
    with Model(demo_path, device="cpu", threads=1) as model:
        yield model


def one_by_one(model: Model, ids: list[int], guide: Guide, seed: int, **options: Any) -> list[int]:
    """Choose each token in NumPy among those that the mask allows."""
    made: list[int] = []
    with model.session() as session:
        logits = session.forward_prompt_logits(ids)
        while not guide.complete:
            words = np.frombuffer(guide.mask(), np.uint8)
            allowed = np.unpackbits(words, bitorder="little")[: logits.size].astype(bool)
            recent, drawn = [*ids, *made][-REPEAT_WINDOW:], Drawn(seed, len(ids) + len(made))
            made.append(sample(logits, allowed=allowed, recent=recent, rng=drawn, **options))
            if made[-1] in model.tokenizer.stop_ids:
                break
            guide.take(made[-1])
            logits = session.forward_token(made[-1])
    return made


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.5, "top_k": 50, "repeat_penalty": 1.2}],
    ids=["greedy", "sampled", "penalties"],
)
def test_tokens_are_those_of_masks_alone(model: Model, options: dict[str, Any]) -> None:
    """So texts have the same probabilities whether forced tokens are sampled or not."""
    ids = model.tokenizer.encode(PROMPT)
    for seed in range(4):
        expected = one_by_one(model, ids, Guide(model.tokenizer, json_schema=PERSON), seed, **options)
        kwargs: dict[str, Any] = {"seed": seed, "json_schema": PERSON, **options}
        assert [p.token for p in model.stream(ids, 200, **kwargs)] == expected
        with_scores = list(model.stream(ids, 200, logprobs=0, **kwargs))
        assert [p.token for p in with_scores] == expected
        assert all(p.logprob is not None for p in with_scores)


def test_forced_tokens_are_computed_together(model: Model) -> None:
    calls: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

        def forward_drafts(self, ids: Any, *args: Any) -> Any:
            calls.append(len(ids))
            return core.forward_drafts(ids, *args)

    with model.session() as session:
        core = session._open()
        session._core = Counting()  # type: ignore[assignment]
        pieces = list(session.stream(PROMPT, 200, json_schema=PERSON))
    assert sum(calls) >= len(pieces) - 2
    assert len(calls) < 0.7 * len(pieces)


def test_random_schemas_are_met(model: Model) -> None:
    from support.random_schemas import check, make

    for schema, text, _ in make(model, 25, 800):
        check(schema, text)


def test_each_kind_of_constraint_is_met(model: Model) -> None:
    text = "".join(model.generate(PROMPT, 100, json_schema=json.dumps(PERSON), temperature=1.0, seed=1))
    assert set(json.loads(text)) == {"name", "kind", "age"}
    text = "".join(model.generate(PROMPT, 50, regex=r"(ROMEO|JULIET) is \d{2} years old\.", seed=2))
    assert re.fullmatch(r"(ROMEO|JULIET) is \d{2} years old\.", text)
    grammar = 'start: ("a" "b")~2..3 END\nEND: "!"'
    text = "".join(model.generate(PROMPT, 50, grammar=grammar, temperature=1.0, seed=3))
    assert text in ("abab!", "ababab!")


def test_batches_and_conversations_are_constrained_too(model: Model) -> None:
    expected = "".join(model.generate(PROMPT, 200, json_schema=PERSON, temperature=1.0, seed=4))
    prompts: list[Any] = [(PROMPT, {"json_schema": PERSON}), "ROMEO:\n", (PROMPT, {"regex": "[ab]{3}"})]
    texts = ["", "", ""]
    for i, piece in model.generate_many(prompts, 200, temperature=1.0, seed=4):
        texts[i] += str(piece)
    assert texts[0] == expected
    assert texts[1] == "".join(model.generate("ROMEO:\n", 200, temperature=1.0, seed=4))
    assert re.fullmatch("[ab]{3}", texts[2])
    chat = Conversation(model)
    assert json.loads("".join(chat.answer("Who art thou?", 200, json_schema=PERSON))).keys() == {
        "name",
        "kind",
        "age",
    }


def test_a_stop_string_may_end_it_earlier(model: Model) -> None:
    text = "".join(model.generate(PROMPT, 200, json_schema=PERSON, stop=', "kind"'))
    assert json.loads(text + "}").keys() == {"name"}


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json_schema": {"type": "nope"}}, "json_schema: Invalid type: nope"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 2}}, "json_schema: .*Unsatisfiable"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": {"a": {1, 2}}}, "json_schema: .*set is not JSON serializable"),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": r"[^\s\S]"}, "regex: no text satisfies it"),
        ({"grammar": "start: foo"}, 'grammar: .*unknown name: "foo"'),
    ],
)
def test_constraints_that_cannot_be_are_named(model: Model, constraint: dict[str, Any], message: str) -> None:
    with model.session() as session:
        with pytest.raises(ConstraintError, match=message):
            session.generate(PROMPT, 20, **constraint)
        assert session.position == 0
    results = list(model.generate_many([([1], constraint), [1]], 2, errors="return"))
    assert {i: type(r) for i, r in results} == {0: ConstraintError, 1: str}


def test_two_constraints_are_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="one constraint at most, got json_schema and regex"):
        model.generate(PROMPT, 20, json_schema=PERSON, regex="a")


def test_a_context_that_ends_first_is_an_error_after_the_last_piece(demo_path: Path) -> None:
    with Model(demo_path, device="cpu", threads=1, max_context=30) as model:
        pieces = model.generate([1] * 15, 100, json_schema=PERSON)
        made: list[str] = []
        with pytest.raises(ConstraintError, match="the context of 30 tokens is full before"):
            made.extend(pieces)
        text = "".join(made)
        assert text.startswith('{"name": "')
        results = list(model.generate_many([[1] * 15], 100, json_schema=PERSON, errors="return"))
        assert "".join(str(r) for _, r in results[:-1]) == text
        assert isinstance(results[-1][1], ConstraintError)
        assert [p.finish_reason for p in model.stream([1], 5, json_schema=PERSON)][-1] == "length"


def test_without_llguidance_the_error_says_what_to_install(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with (
        Model(demo_path, device="cpu", threads=1) as model,
        pytest.raises(MissingExtraError, match=r"pip install 'metal_prefill\[guide\]'"),
    ):
        model.generate(PROMPT, 5, regex="a")
