"""Random request bodies, some repetitive: each becomes a form or an error, in time linear in its size."""

import json
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.fuzzing import fuzz

pytest.importorskip("msgspec", reason="needs the extra serve")

from metal_prefill._support.messages import MOST_CHARACTERS
from metal_prefill.serve import _forms
from metal_prefill.serve._errors import ApiError

FORMS: list[Any] = [
    _forms.CompletionForm,
    _forms.ChatForm,
    _forms.EmbeddingForm,
    _forms.RerankForm,
    _forms.TokenizeForm,
    _forms.DetokenizeForm,
]
FIELDS = sorted({field for form in FORMS for field in form.__struct_fields__})
# Words of the messages of msgspec, and numbers with equal hashes.
WORDS = (
    "[{", '"', "\\", "`", " - at `$", "` - at `$.", "[...]", "\n", "Object contains unknown field `", "a",
    "\0", "\U0010ffff",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 0.5, 1e300, 2**61 - 1, -(2**61))
MOST_BYTES = 200_000  # of a repetition
SECONDS_PER_BYTE = 2e-6
LEAST_S = 0.5  # that any body may take on a busy machine


def odd_text(random: Random, most: int = MOST_BYTES) -> str:
    words = "".join(random.choice(WORDS) for _ in range(random.randrange(4)))
    copies = random.choice((1, 1, 1, 3, most // (4 * len(words) + 1)))
    return words * copies + random.choice(("", "\n", "`", "x"))


def odd_value(random: Random, most: int = MOST_BYTES, depth: int = 0) -> Any:
    """Return a value whose JSON has about `most` characters at most."""
    kind = random.randrange(8 if depth < 4 and most > 100 else 4)
    if kind == 0:
        return random.choice((None, True, False))
    if kind == 1:
        return random.choice(NUMBERS)
    if kind in (2, 3):
        return odd_text(random, most)
    copies = random.choice((0, 1, 2, 1000))
    values = [odd_value(random, most // (copies + 1), depth + 1) for _ in range(min(copies, 3))]
    if copies == 1000:
        values = values[:1] * (most // (len(json.dumps(values[0])) + 20))
    if kind in (4, 5):
        return values
    if copies == 1000:
        step = random.choice(NUMBERS)
        return {str(i * step): value for i, value in enumerate(values)}
    return {random.choice((*FIELDS, odd_text(random, 1000))): value for value in values}


def odd_body(random: Random) -> bytes:
    body = {random.choice(FIELDS): odd_value(random) for _ in range(random.randrange(5))}
    body |= random.choice(
        ({}, {"prompt": "a"}, {"messages": [{"role": "user"}]}, {"query": "", "documents": []})
    )
    if random.random() < 0.3:
        body[odd_text(random)] = odd_value(random)
    text = json.dumps(body, ensure_ascii=random.random() < 0.5).encode()
    for _ in range(random.choice((0, 0, 0, 1, 3))):  # of its structure
        at = random.randrange(len(text) + 1)
        text = (
            text[:at]
            + random.choice((b"", b"[", b"{", b'"', b"\\u", b"\xff", b",", b"9" * 5000))
            + text[at + 1 :]
        )
    return text


def values(parsed: Any) -> int:
    """Count the strings, arrays and objects of JSON whose objects were parsed to tuples of pairs."""
    if isinstance(parsed, (list, tuple)):
        return 1 + sum(values(item) for item in parsed) - isinstance(parsed, Pair)
    return isinstance(parsed, str)


class Pair(tuple[str, Any]):
    """A name and its value."""


def check(body: bytes) -> bool:
    """Decode a body as each form; return whether it is valid for one."""
    valid = False
    with suppress(ValueError):
        parsed = json.loads(body, object_pairs_hook=lambda pairs: tuple(map(Pair, pairs)))
        assert _forms.count_values(body) == values(parsed)
    for form in FORMS:
        begin = time.process_time()
        refused: ApiError | None = None
        try:
            decoded = _forms.decode(body, form)
        except ApiError as error:
            refused = error
        if refused is None:
            valid = True
            assert decoded.metadata is None
        else:
            assert refused.status == 400
            assert len(json.dumps(refused.body())) < 30 * MOST_CHARACTERS  # with escapes, twice
        assert time.process_time() - begin < LEAST_S + SECONDS_PER_BYTE * len(body)
    return valid


def test_bodies() -> None:
    valid = 0

    def run(path: Path, _: Random) -> None:
        nonlocal valid
        valid += check(path.read_bytes())

    fuzz("body", 80, odd_body, run)
    assert valid
