"""Calls as JSON: matching brackets, and values that can be serialized again."""

import json
import re
from contextlib import suppress
from string import ascii_lowercase
from typing import Any, TypeAlias

_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)

MOST_DEPTH = 64  # nesting depth of brackets, which limits how often a character is parsed

_Parts: TypeAlias = "list[tuple[int, int]]"


class Brackets:
    """Pairs of matching brackets in an answer, found in a single pass.

    Whether a quote begins or ends a string depends on where the JSON begins. A text thus has two readings,
    each with its own brackets: those after an even number of quotes, and those after an odd number. A value
    that begins at a bracket contains only brackets of the same reading. Whether a quote is escaped does not
    depend on where the JSON begins.
    """

    def __init__(self, start: int = 0) -> None:
        self.scanned = start  # position in the answer up to which pairs are known
        # End and nesting depth of the value that begins at a bracket.
        self.pairs: dict[int, tuple[int, int]] = {}
        self._quotes = 0  # modulo 2
        self._escape = ""  # a trailing backslash
        # For each open bracket, the entries that end with it: itself and brackets after a backslash, as
        # (position, 0), and (-1, depth) for each pair inside it. The first list belongs to no bracket.
        self._open: tuple[list[_Parts], list[_Parts]] = ([[]], [[]])

    def scan(self, piece: str) -> None:
        """Scan the next characters of the answer, which begin at `scanned`."""
        begin = self.scanned - len(self._escape)
        text, after = self._escape + piece, 0
        for match in _STRUCTURE.finditer(text):
            after = match.end()
            found = match[0]
            if found == '"':
                self._quotes ^= 1
                continue
            opened = self._open[self._quotes]
            if found[0] == "\\":
                if found[1] in "{[":
                    opened[-1].append((begin + after - 1, 0))
            elif found in "{[":
                opened.append([(begin + match.start(), 0)])
            else:
                depth = 1
                for start, inner in reversed(opened.pop()):
                    if start < 0:
                        depth = max(depth, inner + 1)
                    else:
                        self.pairs[start] = begin + after, depth
                if opened:
                    opened[-1].append((-1, depth))
                else:
                    opened.append([])
        self._escape = "\\" if after < len(text) and text[-1] == "\\" else ""
        self.scanned += len(piece)


def read_json(text: str) -> Any:
    """Parse JSON.

    Raises ValueError for invalid JSON and for values that `checked` refuses.
    """
    try:
        return checked(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def checked(value: Any) -> Any:
    """Return the value unchanged if it can be written as JSON anywhere.

    Raises ValueError for NaN, numbers beyond float64, lone surrogates and deep nesting.
    """
    if _depth(value) > MOST_DEPTH:
        raise ValueError("nested too deeply")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    return value


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


_CUT_ESCAPE = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
_ENDINGS = ("", "null", ": null", "0", '"')
_BETWEEN = " \t\r\n,"


def read_arguments(text: str) -> Any:
    """Parse the arguments of a call as JSON, also if they end too early; return other text as it is."""
    with suppress(ValueError):
        return read_json(text.strip() or "{}")
    closing: list[str] = []
    in_string, begin = False, 0  # of the last string
    for match in _STRUCTURE.finditer(text):
        found = match[0]
        if found == '"':
            in_string, begin = not in_string, match.start()
        elif not in_string and found in ("{", "["):
            closing.append("}" if found == "{" else "]")
        elif not in_string and closing and found in closing[-1]:
            closing.pop()
    if closing[:1] != ["}"]:
        return text
    if in_string:  # a value, or a name, which is removed
        begun_texts = [text, _CUT_ESCAPE.sub("", text), text[:begin].rstrip(_BETWEEN)]
    else:
        begun_texts = [text.rstrip(ascii_lowercase).rstrip(_BETWEEN)]
    for begun in begun_texts:
        for ending in _ENDINGS:
            with suppress(ValueError):
                return read_json("".join([begun, ending, *reversed(closing)]))
    return text
