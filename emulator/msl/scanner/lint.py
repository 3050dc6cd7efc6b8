"""Finds constructs that Metal forbids and C++ for OpenCL accepts."""

from collections.abc import Iterator

from .tokens import SourceError, TokenList

NOT_METAL = {
    "goto": "Metal has no goto",
    "virtual": "Metal has no virtual functions",
    "asm": "Metal has no inline assembly",
    "wchar_t": "Metal has no wchar_t",
}


def lint(tokens: TokenList) -> list[SourceError]:
    """Return every violation."""
    return [*_words(tokens), *_literals(tokens)]


def _words(tokens: TokenList) -> Iterator[SourceError]:
    for index, token in enumerate(tokens):
        if token.kind != "name" or tokens.at(index - 1) in (".", "->"):
            continue
        if token.text in NOT_METAL:
            yield token.error(f"'{token.text}': {NOT_METAL[token.text]}")
        elif token.text.startswith("__builtin"):
            yield token.error(f"'{token.text}' is not a function of Metal")
        elif token.text == "long" and tokens.at(index + 1) == "long":
            yield token.error("'long long' is not a type of Metal")


def _literals(tokens: TokenList) -> Iterator[SourceError]:
    for token in tokens:
        hexadecimal = token.text[:2] in ("0x", "0X")
        if token.kind == "number" and "." in token.text and token.text[-1] in "lL" and not hexadecimal:
            yield token.error(f"'{token.text}': Metal has no long double")
        if token.kind == "number" and token.text.lower().rstrip("u").endswith("ll"):
            yield token.error(f"'{token.text}': Metal has no long long")
