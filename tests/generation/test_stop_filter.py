"""Stop strings in a text that arrives in pieces."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_prefill.generation._ending import StopFilter

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
        assert (passed, stop_filter.found) == passed_on(stops, text)
        if stop_filter.found:
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
