"""Random constraints: each compiles or is a ConstraintError, and a text follows it to its end or an error."""

import json
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.files.json_mutator import changed
from support.fuzzing import damaged, fuzz, sentence
from support.random_schemas import random_schema

from metal_prefill import ConstraintError, Model

pytest.importorskip("llguidance", reason="needs the extra guide")
STEPS = 40  # tokens of a text


Constraint = tuple[str, str]  # kind and source

_TERMINALS = ["T1", "T2"]
_NAMES = ["start", "r1", "r2", "r3", *_TERMINALS]
# Regular expressions, and the right sides of rules with names and of terminals.
_PATTERN = {
    "regex": ["@part", "@part@part", "@part@part@part"],
    "part": [
        *("a", "b", ".", r"\d", r"\w", "[a-z]", "[^#]", "ab", "é", r"\.", "(?i:x)", "[", r"\p{L}", "(?s:.)"),
        *("$", "^", "@part", "@part", "@part", "@part@count", "@part@count"),
        *("(@regex)", "(@regex|@regex)", "(@regex|@regex|@regex)@count"),
    ],
    "count": ["*", "+", "?", "{2}", "{0,3}", "{500}", "{20000}", "{3,}", "{5,2}"],
}
_RULE = _PATTERN | {
    "rule": ["@item", "@item @item", "@item | @item", "@item @item @item", "@item | @item | @item"],
    "item": [
        *('"a"', "@name", '"@word"@times', "/@regex/@times", "@name@times", "(@rule)@times", "(@rule)@times"),
    ],
    "word": ["a", "b", " ", "{", "abc", '\\"'],
    "times": ["", "", "", "*", "+", "?", "~2", "~1..400", "{3,90}"],
    "name": [*_NAMES, "missing"],
}
_TERMINAL = _RULE | {"name": _TERMINALS}
# Grammars that ignore white space and contain some: matching can take forever.
_SPACES = {
    "grammar": [
        '%ignore @ignored\nstart: "b"+ | @counted\nr1: " " | @space " "',
        '%ignore @ignored\nstart: "b"+ | @counted @counted\nr1: " " | @space " "',
    ],
    "ignored": ["/[ ]+/", "/ +/", "/ /", '" "', "/[ \\t]*/", "/ {1,9}/"],
    "counted": ["@space", "@space+", "@space*", "@space{3,90}", "@space~1..400"],
    "space": ['" "', "/ /", "/ +/", '(" " | "a")', "r1"],
}
_KEYWORDS = ["anyOf", "allOf", "oneOf"]
_ODD_PARTS: list[Any] = [
    *(True, False, None, 0, 7, -1, 10**6, 10**9, 2.5, "", "\u00e9\n", [], [1], {}, {"x": 1}, {"$ref": "#"}),
    *({"$ref": "#/$defs/d"}, {"$ref": "#/$defs/d", "$defs": {"d": {"type": "number"}}}),
    *({"type": "string", "minLength": n, "maxLength": 10**6} for n in (0, 4)),
    {"type": "array", "items": {"type": "integer"}, "minItems": 50},
]


def write_constraint(random: Random) -> Constraint:
    kind = random.choice(["regex", "grammar", "json_schema"])
    if random.random() < 0.1:
        source = _nested(random, kind)
    elif kind == "regex":
        source = sentence(_PATTERN, "regex", random, 4)
    elif kind == "grammar":
        source = _grammar(random) if random.random() < 0.8 else sentence(_SPACES, "grammar", random, 3)
    else:
        source = _schema(random)
    if random.random() < 0.1:
        source = damaged(source, random, ["", "(", '"', "/", "{", "\\", "\0", "\ud800"])
    return kind, source


def _nested(random: Random, kind: str) -> str:
    """Return a constraint whose parts contain each other, to depths at which recursion may fail or not."""
    depth = random.choice([20, 120, 128, 140, 300, 1000, 3000, 20_000])
    if kind == "json_schema":
        begin, end = random.choice(
            [
                ('{"not":', "}"),
                ('{"anyOf":[', "]}"),
                ('{"items":', ',"type":"array"}'),
                ('{"type":"object","properties":{"x":', '},"required":["x"]}'),
                ('{"additionalProperties":', ',"type":"object"}'),
                ('{"enum":[', "]}"),
            ]
        )
        return begin * depth + random.choice(['{"type":"null"}', "true", "{}"]) + end * depth
    begin, end = random.choice([("(", ")"), ("(?:a|", ")"), ("(", ")?"), ("(", ")*"), ("(b", "){0,2}")])
    pattern = f"{begin * depth}a{end * depth}"
    if kind == "regex":
        return pattern
    begin, end = random.choice([("(", ")"), ("(", ")?"), ('("a" | ', ")"), ("[", "]")])
    rule = f'{begin * depth}"a"{end * depth}'
    return random.choice([f"start: {rule}", f"start: T\nT: {rule}", f"start: /{pattern}/"])


def _grammar(random: Random) -> str:
    lines = ["%ignore /[ ]+/"] if random.random() < 0.2 else []
    for name in random.sample(_NAMES, random.randrange(1, 6)):
        right = _TERMINAL if name in _TERMINALS else _RULE
        lines.append(f"{name}: {sentence(right, 'rule', random, 3)}")
    if not any(line.startswith("start") for line in lines):
        lines.append("start: r1 T1?")
    return "\n".join(lines)


def _schema(random: Random) -> str:
    """Return a JSON schema of which some parts are odd."""
    parts = [
        *_ODD_PARTS,
        {"type": "string", "pattern": sentence(_PATTERN, "regex", random, 3)},
        random_schema(random, 1),
    ]
    schema: Any = random_schema(random, 3)
    for _ in range(random.randrange(4)):
        schema = changed(schema, random, parts)
    return json.dumps(schema).replace("anyOf", random.choice(_KEYWORDS))


def follow(model: Model, kind: str, source: str, random: Random) -> bool:
    """Choose random tokens among those that a constraint allows, after drafts some of which are wrong.

    Returns whether the constraint compiled.
    """
    from metal_prefill.generation._constraint import Constraint

    tokenizer = model.tokenizer
    blank = {i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b" "}
    spaces = random.choice([0.0, 0.0, 0.9])  # of a text, which matching some grammars takes long for
    try:
        constraint = Constraint(model.tokenizer, **{kind: source})
    except ConstraintError:
        return False
    with suppress(ConstraintError):
        deadline = random.choice([None, 0.0, time.monotonic() + 60])  # batches wait for a moment only
        for _ in range(STEPS):
            bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: model.config.vocab_size])
            assert allowed.size
            token = int(random.choice(allowed))
            if blank.intersection(allowed) and random.random() < spaces:
                token = blank.intersection(allowed).pop()
            masks = constraint.ahead([token, random.randrange(model.config.vocab_size)], deadline)
            if token in model.tokenizer.stop_ids:
                break
            if deadline is not None:
                constraint.send([token], 0, 2)
            if constraint.advance([token]).take():
                break
            assert not masks or masks[0] == constraint.mask()
            step = constraint.advance([], most_forced=STEPS)
            if any([step.take() for _ in step.forced[:STEPS]]):
                break
    return True


def test_constraints(bundled: Model) -> None:
    compiled = 0

    def run(path: Path, random: Random) -> None:
        nonlocal compiled
        kind, _, source = path.read_bytes().decode("utf-8", "surrogatepass").partition(" ")
        compiled += follow(bundled, kind, source, random)

    def write(random: Random) -> bytes:
        return " ".join(write_constraint(random)).encode("utf-8", "surrogatepass")

    fuzz("constraint", 50, write, run)
    print(f"{compiled:,} of them compiled")
    assert compiled > 10  # fewer: the writer is wrong, or the worker does not start
