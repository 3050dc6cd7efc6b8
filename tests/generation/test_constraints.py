"""Constrained texts satisfy the constraint, and equal those of choosing single tokens under masks."""

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.native_requests import passes_of_texts
from support.random_schemas import random_schema
from support.sampling_reference import reference_tokens

from metal_prefill import ConstraintError, MissingExtraError, Model, Scheduler
from metal_prefill.engine import RowCost
from metal_prefill.generation import _constraint, _constraint_worker, _scheduler
from metal_prefill.generation._constraint import Constraint
from metal_prefill.generation._constraint_worker import _prepare, _Spelling, _Texts
from metal_prefill.generation._guide import MOST_FORCED
from metal_prefill.generation._speculation import MOST_DRAFTS

pytest.importorskip("llguidance", reason="needs the extra guide")
jsonschema = pytest.importorskip("jsonschema", reason="checks texts with jsonschema")

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


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.5, "top_k": 50, "repeat_penalty": 1.2}],
    ids=["greedy", "sampled", "penalties"],
)
def test_tokens_match_those_of_masks_alone(model: Model, options: dict[str, Any]) -> None:
    """Texts have the same probabilities whether forced tokens are sampled or not."""
    ids = model.tokenizer.encode(PROMPT)
    for seed in range(4):
        constraint = Constraint(model.tokenizer, json_schema=PERSON)
        expected = reference_tokens(model, ids, 200, seed, constraint, **options)
        kwargs: dict[str, Any] = {"seed": seed, "json_schema": PERSON, **options}
        assert [p.token for p in model.session().stream(ids, 200, **kwargs)] == expected
        with_scores = list(model.session().stream(ids, 200, logprobs=0, **kwargs))
        assert [p.token for p in with_scores] == expected
        assert all(p.logprob is not None for p in with_scores)


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_the_number_of_forced_tokens_in_a_pass_is_bounded(
    model: Model, monkeypatch: pytest.MonkeyPatch, speculate: Any
) -> None:
    for module in (_constraint, _scheduler):  # a step delivers one pass, however slow the machine is
        monkeypatch.setattr(module, "BATCH_PATIENCE", 100.0)
    regex = "(thou art a fool, my lord! ){40}"
    expected = [piece.token for piece in model.session().stream(PROMPT, 700, regex=regex, logprobs=0)]
    assert len(expected) > 5 * MOST_FORCED
    scheduler = Scheduler(model)
    scheduler.submit(PROMPT, 700, regex=regex, speculate=speculate)
    made: list[int] = []
    most, passes = 0, 0
    while scheduler.streams:
        tokens = [piece.token for _, piece in scheduler.step_pieces()]
        made += tokens
        most, passes = max(most, len(tokens)), passes + bool(tokens)
    assert made == expected
    assert most <= 1 + MOST_DRAFTS + MOST_FORCED
    if speculate == "off":
        assert passes == -(-len(expected) // (1 + MOST_FORCED))


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_speculation_does_not_change_constrained_text(model: Model, options: dict[str, Any]) -> None:
    prompt = PROMPT + json.dumps({"name": "Lear", "kind": "king", "age": 80}) + "\nAnother person: "
    ids = model.tokenizer.encode(prompt)
    kwargs: dict[str, Any] = {"json_schema": PERSON, **options}
    expected = list(model.session().stream(ids, 200, speculate="off", **kwargs))
    tokens = [piece.token for piece in expected]
    kept: list[int] = []

    def planted(so_far: list[int]) -> list[int]:
        made, wrong = len(so_far) - len(ids), len(so_far) % 4
        kept.append(wrong)
        return [*tokens[made : made + wrong], *[7 * len(so_far) % 1000, model.tokenizer.eos_id or 0, 300]]

    for speculate in ("lookup", planted):
        assert list(model.session().stream(ids, 200, speculate=speculate, **kwargs)) == expected
        with_scores = list(model.session().stream(ids, 200, speculate=speculate, logprobs=1, **kwargs))
        assert with_scores == list(model.session().stream(ids, 200, speculate="off", logprobs=1, **kwargs))
        many = list(model.stream_many([ids, (ids, {"seed": 9})], 200, speculate=speculate, **kwargs))
        assert [piece for i, piece in many if i == 0] == expected
    assert set(kept) == {0, 1, 2, 3}


@pytest.mark.usefixtures("most_drafts")
def test_speculation_saves_passes_under_a_constraint(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, passes = model.tokenizer.encode(PROMPT), passes_of_texts(monkeypatch)
    tokens: list[int] = []

    def right(so_far: list[int]) -> list[int]:
        return tokens[len(so_far) - len(ids) :]

    for speculate in ("off", right):
        # With log probabilities nothing is forced, so each token needs a row.
        pieces = list(model.session().stream(ids, 60, json_schema=PERSON, logprobs=0, speculate=speculate))
        tokens, count = [piece.token for piece in pieces], len(passes)
        passes.clear()
    assert count == -(-(len(tokens) - 1) // (MOST_DRAFTS + 1))


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize("many", [False, True])
def test_forced_tokens_do_not_lower_the_estimated_cost_of_drafts(
    model: Model, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """Their rows have no output, so a pass with them does not measure one with as many drafts."""
    noted: list[int] = []
    passes = passes_of_texts(monkeypatch)
    monkeypatch.setattr(RowCost, "note", lambda self, rows, seconds: noted.append(rows))
    options: dict[str, Any] = {"json_schema": PERSON, "speculate": lambda so_far: [5] * 3}
    ids = model.tokenizer.encode(PROMPT)
    if many:
        list(model.stream_many([ids], 60, **options))
        del noted[0]  # the prompt's pass
    else:
        list(model.session().stream(ids, 60, **options))
    forced = [rows for rows, drafts in passes if rows > drafts + 1]
    assert len(forced) == 3
    assert noted == [rows for rows, drafts in passes if rows == drafts + 1]


@pytest.mark.usefixtures("most_drafts")
def test_drafts_with_forced_tokens_stay_within_exact_rows(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.engine, "exact_rows", 12)
    ids = model.tokenizer.encode(PROMPT)
    options: dict[str, Any] = {"json_schema": PERSON}
    tokens = [piece.token for piece in model.session().stream(ids, 60, speculate="off", **options)]
    passes = passes_of_texts(monkeypatch)
    options["speculate"] = lambda so_far: tokens[len(so_far) - len(ids) :]
    assert [piece.token for piece in model.session().stream(ids, 60, **options)] == tokens
    assert any(drafts and rows > drafts + 1 for rows, drafts in passes)
    assert all(rows <= 12 for rows, drafts in passes if drafts)


def test_an_error_in_a_draft_does_not_affect_the_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_constraint_worker, "_limit_memory", lambda memory: None)  # of this process
    tokenizer = model.tokenizer
    a, b = (tokenizer.encode(c, add_bos=False)[0] for c in "ab")
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    specials = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    spelling = _Spelling(tokens, specials, sorted(tokenizer.stop_ids))
    texts = _Texts(_prepare(spelling), spelling.stop_ids)
    monkeypatch.setattr(
        _Spelling, "__call__", lambda self, text: tokenizer.encode(text.decode(), add_bos=False)
    )
    texts.compile("regex", "abc", 0, trial=False)
    expected = texts.advance(0, [], [a], 0, 9)
    assert expected.startswith(b'[1, false, [], "", false]\n')

    class Failing:
        """Behaves like llguidance when masks become too complex."""

        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def compute_bitmask(self) -> bytes:
            matcher.consume_token(a)
            assert matcher.is_error()
            return b""

    matcher, taken = texts._texts[0]
    texts._texts[0] = Failing(), taken
    assert texts.ahead(0, None, [b, a]) == b"[0]\n"
    assert texts.advance(0, None, [], 0, 9) == expected.replace(b"[1,", b"[0,", 1)
    assert texts.advance(0, None, [b], 0, 9).startswith(b'[1, false, [], "", false]\n')


def test_random_schemas_are_satisfied(model: Model) -> None:
    for i in range(25):
        rng = random.Random(i)
        schema, prompt = random_schema(rng), rng.choice(["A record: ", "JSON:\n", "The answer is "])
        options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.5]), "seed": i}
        pieces = list(model.session().stream(prompt, 800, json_schema=schema, **options))
        assert pieces[-1].finish_reason == "stop", schema
        jsonschema.validate(json.loads("".join(piece.text for piece in pieces)), schema)


def test_each_kind_of_constraint_is_satisfied(model: Model) -> None:
    text = "".join(model.generate(PROMPT, 50, regex=r"(ROMEO|JULIET) is \d{2} years old\.", seed=2))
    assert re.fullmatch(r"(ROMEO|JULIET) is \d{2} years old\.", text)
    grammar = 'start: ("a" "b")~2..3 END\nEND: "!"'
    text = "".join(model.generate(PROMPT, 50, grammar=grammar, temperature=1.0, seed=3))
    assert text in ("abab!", "ababab!")


def test_a_stop_string_may_end_a_constrained_text(model: Model) -> None:
    text = "".join(model.generate(PROMPT, 200, json_schema=PERSON, stop=', "kind"'))
    assert json.loads(text + "}").keys() == {"name"}


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json_schema": {"type": "nope"}}, "json_schema: Invalid type: nope"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 2}}, "json_schema: .*Unsatisfiable"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": {"enum": [175928847299117063]}}, "json_schema: the number 175928847299117063 has"),
        ({"json_schema": {"items": {"const": {"a": [-(2**53) - 1]}}}}, "the number -9007199254740993 has"),
        ({"json_schema": {"properties": {"default": {"minimum": 2**53 + 1}}}}, "the number 9007199254740993"),
        ({"json_schema": {"anyOf": [{"exclusiveMaximum": 10**18 + 1}]}}, "the number 1000000000000000001"),
        ({"json_schema": {"const": 10**400}}, "the number 1000"),
        ({"json_schema": {"minimum": 2**63}}, "the number 9223372036854775808"),
        ({"json_schema": {"a": {1, 2}}}, "json_schema: .*set is not JSON serializable"),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": r"[^\s\S]"}, "regex: no text satisfies it"),
        ({"grammar": "start: foo"}, 'grammar: .*unknown name: "foo"'),
    ],
)
def test_invalid_constraints_are_reported(model: Model, constraint: dict[str, Any], message: str) -> None:
    with model.session() as session:
        with pytest.raises(ConstraintError, match=message):
            session.generate(PROMPT, 20, **constraint)
        assert session.position == 0
    results = list(model.generate_many([([1], constraint), [1]], 2, errors="return"))
    assert {i: type(r) for i, r in results} == {0: ConstraintError, 1: str}


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"const": 2**53}, str(2**53)),
        ({"enum": [2**60]}, str(2**60)),
        ({"const": 7, "default": 2**53 + 1}, "7"),
        ({"type": "integer", "minimum": 2**62, "maximum": 2**62}, str(2**62)),
        ({"type": "integer", "minimum": 5, "maximum": 2**64 - 1}, "5"),
    ],
)
def test_large_integers_that_float64_holds_are_written(
    model: Model, schema: dict[str, Any], written: str
) -> None:
    text = Constraint(model.tokenizer, json_schema=schema)
    ids = model.tokenizer.encode(written, add_bos=False)
    assert text.advance(ids, room=len(ids)).met


def test_a_forced_token_is_not_one_that_options_exclude(model: Model) -> None:
    (token,) = model.tokenizer.encode("c", add_bos=False)
    excluding: list[dict[str, Any]] = [
        {"logit_bias": {token: -math.inf}},
        {"stop": [token], "min_tokens": 9},
    ]
    for options in excluding:
        with pytest.raises(ValueError, match="there is no token to choose"):
            list(model.session().generate(PROMPT, 20, regex="a?bcd", **options))


@pytest.mark.parametrize("excludes", ["logit_bias", "min_tokens"])
def test_excluded_stop_tokens_leave_other_tokens_forced(
    model: Model, monkeypatch: pytest.MonkeyPatch, excludes: str
) -> None:
    stop_ids = sorted(model.tokenizer.stop_ids)
    excluding = {"logit_bias": dict.fromkeys(stop_ids, -math.inf), "min_tokens": 9}
    options: dict[str, Any] = {excludes: excluding[excludes]}
    passes = passes_of_texts(monkeypatch)
    assert "".join(model.session().generate(PROMPT, 20, regex="a{12}", **options)) == "a" * 12
    assert not passes  # the first token is that of the prompt's pass, and forces the others
    # A constraint that forces a stop token does not override the options.
    with pytest.raises(ValueError, match="there is no token to choose"):
        list(model.session().generate(PROMPT, 20, grammar=f'start: "a"~6 <[{stop_ids[0]}]>', **options))


def test_two_constraints_are_rejected(model: Model) -> None:
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
        assert [p.finish_reason for p in model.session().stream([1], 5, json_schema=PERSON)][-1] == "length"


def test_without_llguidance_the_error_names_the_extra(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with (
        Model(demo_path, device="cpu", threads=1) as model,
        pytest.raises(MissingExtraError, match=r"pip install 'metal_prefill\[guide\]'"),
    ):
        model.generate(PROMPT, 5, regex="a")
