"""Random constraints: each compiles or is a ConstraintError, and a text follows it to its end or an error."""

from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from support.constraint_writer import write_constraint
from support.fuzzing import TIMEOUT, fuzz

from metal_prefill import ConstraintError, Model

pytest.importorskip("llguidance", reason="needs the extra guide")
pytestmark = pytest.mark.timeout(TIMEOUT)

STEPS = 40  # tokens of a text


def answered(constraint: Any, method: str, *arguments: Any, **named: Any) -> Any:
    """Call a method until it has an answer, as batches do, which wait for a moment only."""
    from metal_prefill.generation._constraint import ConstraintPending

    while True:
        try:
            return getattr(constraint, method)(*arguments, **named)
        except ConstraintPending:
            constraint.pending.exception(60)


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
        constraint.deadline = random.choice([None, 0.0])
        for _ in range(STEPS):
            bits = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: model.config.vocab_size])
            assert allowed.size
            token = int(random.choice(allowed))
            if blank.intersection(allowed) and random.random() < spaces:
                token = blank.intersection(allowed).pop()
            masks = answered(constraint, "ahead", [token, random.randrange(model.config.vocab_size)])
            if token in model.tokenizer.stop_ids:
                break
            if answered(constraint, "advance", [token]).take():
                break
            assert not masks or masks[0] == constraint.mask()
            step = answered(constraint, "advance", [], most_forced=STEPS)
            if any([step.take() for _ in step.forced[:STEPS]]):
                break
    return True


def test_constraints(bundled: Model) -> None:
    compiled = 0

    def run(content: bytes, random: Random) -> None:
        nonlocal compiled
        kind, _, source = content.decode("utf-8", "surrogatepass").partition(" ")
        compiled += follow(bundled, kind, source, random)

    def write(random: Random) -> bytes:
        return " ".join(write_constraint(random)).encode("utf-8", "surrogatepass")

    fuzz("constraint", 50, write, run)
    print(f"{compiled:,} of them compiled")
    assert compiled > 10  # fewer: the writer is wrong, or the worker does not start
