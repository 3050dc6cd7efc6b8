"""Parts of a text, each alone: its decoding, stop strings and end, and the choice of its tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_prefill.generation._constraint import Step
from metal_prefill.generation._guide import Guide
from metal_prefill.generation._text_generation import StopFilter, TextWriter

STOP = 0


class Letters:
    """Decodes token n to the letter n of the alphabet, one token late, as an incomplete character is."""

    def __init__(self) -> None:
        self.held = ""

    def step(self, token: int) -> str:
        ready, self.held = self.held, chr(ord("a") + token)
        return ready

    def flush(self) -> str:
        ready, self.held = self.held, ""
        return ready


@pytest.mark.parametrize(
    ("limits", "tokens", "text", "reason"),
    [
        ({}, [1, 2, STOP], "bc", "stop"),
        ({}, [1, 2, 24], "b", None),  # the last one is incomplete, the one before it may begin "cd"
        ({}, [1, 2, 3, 4], "b", "stop"),
        ({"least": 9}, [1, 2, 3, 4, STOP], "bcde", "stop"),
        ({"most": 3}, [1, 2, 24], "bcy", "length"),
        ({"most": 3}, [1, 2, 3], "b", "length"),  # a stop string that is complete with the last token
        ({"room": 2}, [1, 2], "bc", "context"),
        ({"given": 2, "most": 3}, [7, 8, 1], "b", "length"),
        ({"given": 2, "most": 2}, [7, 8], "", "length"),
        ({"complete": 2}, [1, 2], "bc", "stop"),
    ],
)
def test_a_text_ends_for_one_reason(
    limits: dict[str, Any], tokens: list[int], text: str, reason: str | None
) -> None:
    complete = limits.pop("complete", None)
    given = {"given": 0, "least": 0, "most": 99, "room": 99, **limits}
    decoder: Any = Letters()
    writer = TextWriter(decoder, ["cd"], frozenset({STOP}), **given)
    parts = []
    for token in tokens:
        assert writer.ended is None
        parts.append(writer.take(token, lambda token: token == complete))
    assert ("".join(parts), writer.ended, writer.made) == (text, reason, len(tokens))


class Requests:
    """A constraint that allows the first draft, and records its requests."""

    def __init__(self) -> None:
        self.requests = list[Any]()

    def ahead(self, drafts: list[int], deadline: float | None) -> list[bytes]:
        return [b"ahead"] * min(len(drafts), 1)

    def mask(self) -> bytes:
        return b"mask"

    def advance(self, tokens: list[int], most_forced: int, room: int) -> Step:
        self.requests.append((tokens, most_forced, room))
        return Step(len(tokens), False, [], "", True)


class Masks:
    """A sampler that records what it may choose from."""

    def __init__(self) -> None:
        self.allowed = list[Any]()

    def allow(self, masks: list[bytes]) -> None:
        self.allowed.append(masks)


def test_a_constraint_limits_drafts_and_receives_no_tokens_after_the_end_of_a_text() -> None:
    constraint: Any = Requests()
    sampler: Any = Masks()
    guide = Guide(sampler, constraint, frozenset({STOP}), forces=False)
    assert guide.allow([5, 6]) == 1
    assert sampler.allowed == [[b"mask"], [b"mask", b"ahead"]]
    guide.advance([4, STOP], [4, STOP], 9)
    guide.advance([STOP], [STOP], 9)
    guide.advance([4], [], 9)  # given tokens
    assert constraint.requests == [([4, STOP], 0, 1)]
    assert not guide.met


LETTERS = st.text("ab", max_size=12)


def passed_on(stops: list[str], text: str) -> tuple[str, bool]:
    """Return the part of a text that certainly precedes any stop string, and whether one was found."""
    found = [text.index(stop) for stop in stops if stop in text]
    if found:
        return text[: min(found)], True
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[:start], False
    return text, False


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.lists(LETTERS, max_size=8))
def test_text_that_cannot_belong_to_a_stop_string_is_passed_on(stops: list[str], pieces: list[str]) -> None:
    stop_filter, text, passed = StopFilter(stops), "", ""
    for piece in pieces:
        text += piece
        passed += stop_filter.step(piece)
        assert (passed, stop_filter.stop is not None) == passed_on(stops, text)
        if stop_filter.stop is not None:
            break
    else:
        assert passed + stop_filter.flush() == text


class Counted(str):
    """A string that counts the characters that are read of it."""

    read = 0

    def __getitem__(self, index: Any) -> str:
        found = super().__getitem__(index)
        self.read += len(found)
        return found


@pytest.mark.parametrize("unit", ["#", "ab", "aab"])
def test_characters_read_of_a_stop_string_are_linear_in_the_text(unit: str) -> None:
    n = 6000
    stop = Counted(unit * n + "!")
    stop_filter = StopFilter([stop])
    text = (unit * n + "?") * 2
    passed = "".join(stop_filter.step(char) for char in text)
    assert passed + stop_filter.flush() == text
    assert 0 < stop.read <= 4 * (len(text) + len(stop))
