"""Texts of limited length for messages."""

from __future__ import annotations

MOST_CHARACTERS = 1000  # of a message; the middle of a longer one, such as a value of megabytes, is left out


def shortened(text: str) -> str:
    """Return a text without its middle if it is long."""
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
