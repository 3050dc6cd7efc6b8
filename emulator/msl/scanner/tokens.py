"""Tokens of a preprocessed Metal source.

Passes rewrite a source by changing the ``out`` text of its tokens. White space, comments and line markers
stay attached to the token after them, so the output has the lines of the input.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"""
    (?P<space>\s+ | //[^\n]* | /\*.*?\*/)
  | (?P<directive>\#(?:\\\n|[^\n])*)
  | (?P<string>"(?:\\.|[^"\\])*")
  | (?P<character>'(?:\\.|[^'\\])+')
  | (?P<number>(?:0[xX][0-9a-fA-F.]+(?:[pP][+-]?\d+)?|0[bB][01]+
                |(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)[A-Za-z]*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<punctuation>::|->\*|->|<<=|<<|\.\.\.|[-+*/%&|^=<!]=|>=|&&|\|\||\+\+|--|.)
    """,
    re.VERBOSE | re.DOTALL,
)
# The count of an unrolled loop may name macros, which are unknown after the preprocessor. It is only a hint,
# so it is removed.
UNROLL_COUNT = re.compile(
    r"#\s*pragma\s+(?:clang\s+loop\s+)?unroll(?:_count)?\s*\(?\s*(?!enable|full|disable)[^()\s\d]"
)
LINE_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')
OPENING = {"(": ")", "[": "]", "{": "}"}


class SourceError(Exception):
    """A source that Metal would reject, or that is outside of the modelled language."""


@dataclass(slots=True)
class Token:
    """One token: its kind and text, the space before it, its position, and its replacement."""

    kind: str
    text: str
    space: str
    file: str
    line: int
    out: str = ""

    def __post_init__(self) -> None:
        self.out = self.text

    def error(self, message: str) -> SourceError:
        """Return an error at this token."""
        return SourceError(f"{self.file}:{self.line}: error: {message}")


class TokenList(list[Token]):
    """The tokens of a source, with partners of brackets.

    ``partner[i]`` is the index of the bracket that belongs to bracket ``i``, for (), [] and {}.
    """

    def __init__(self, tokens: Iterable[Token], tail: str = "") -> None:
        super().__init__(tokens)
        self.tail = tail
        self.partner: dict[int, int] = {}
        stack: list[int] = []
        for index, token in enumerate(self):
            if token.text in OPENING:
                stack.append(index)
            elif token.text in (")", "]", "}"):
                if not stack or OPENING[self[stack[-1]].text] != token.text:
                    raise token.error(f"unmatched '{token.text}'")
                opening = stack.pop()
                self.partner[opening], self.partner[index] = index, opening
        if stack:
            raise self[stack[-1]].error(f"unmatched '{self[stack[-1]].text}'")

    def at(self, index: int) -> str:
        """Return the text of a token, empty outside of the list."""
        return self[index].text if 0 <= index < len(self) else ""

    def kind(self, index: int) -> str:
        """Return the kind of a token, empty outside of the list."""
        return self[index].kind if 0 <= index < len(self) else ""

    def is_attribute(self, index: int) -> bool:
        """Whether ``[[`` begins here."""
        return self.at(index) == "[" and self.at(index + 1) == "[" and not self[index + 1].space

    def closing_angle(self, index: int, *, certain: bool = False) -> int | None:
        """Return the ``>`` that closes the ``<`` at index; None for a comparison or another token.

        A logical operator implies a comparison, unless it is ``certain`` that template parameters begin.
        """
        depth = 0
        if self.at(index) != "<":
            return None
        while index < len(self):
            text = self[index].text
            if text == "<" and (depth == 0 or self.kind(index - 1) == "name"):
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return index
            elif text in ("(", "["):
                index = self.partner[index]
            elif text in (";", "{", "}", ")", "]") or (text in ("&&", "||") and not certain):
                return None
            index += 1
        return None

    def outer(self, begin: int, end: int) -> Iterator[int]:
        """Yield the indices of tokens in [begin, end) that are not inside brackets or template arguments.

        Includes opening brackets.
        """
        index = begin
        while index < end:
            yield index
            if self[index].text in OPENING:
                index = self.partner[index]
            elif (closing := self.closing_angle(index)) is not None and closing < end:
                index = closing
            index += 1

    def text(self, begin: int, end: int) -> str:
        """Return the source text of tokens [begin, end) on one line."""
        return "".join((" " if t.space else "") + t.text for t in self[begin:end]).strip()

    def written(self, begin: int, end: int) -> str:
        """Return the output text of tokens [begin, end) on one line."""
        return "".join((" " if t.space else "") + t.out for t in self[begin:end]).strip()

    def erase(self, begin: int, end: int) -> None:
        """Remove tokens [begin, end) from the output."""
        for token in self[begin:end]:
            token.out = ""

    def render(self) -> str:
        """Return the rewritten source."""
        return "".join(part for token in self for part in (token.space, token.out)) + self.tail


def tokenize(source: str, file: str) -> TokenList:
    """Return the tokens of a preprocessed source; directives are part of the space before a token."""
    tokens: list[Token] = []
    position, line, space = 0, 1, ""
    while position < len(source):
        match = TOKEN.match(source, position)
        assert match is not None  # the pattern ends in '.'
        kind, text = match.lastgroup or "", match.group()
        position = match.end()
        if kind == "directive" and (marker := LINE_MARKER.match(text)):
            line, file = int(marker[1]) - 1, marker[2]
            space += f'#line {line + 1} "{file}"'
        elif kind == "directive":
            space += "" if UNROLL_COUNT.match(text) else text
        elif kind == "space":
            space += text if not text.startswith("/") else "\n" * text.count("\n") or " "
            line += text.count("\n")
        else:
            tokens.append(Token(kind, text, space, file, line))
            space = ""
            line += text.count("\n")
    return TokenList(tokens, space)
