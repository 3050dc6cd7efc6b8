"""Attributes ``[[...]]`` and integer constant expressions."""

import re
from dataclasses import dataclass

from .tokens import TokenList

INTEGER_SUFFIX = re.compile(r"(?<=[0-9a-fA-F])[uUlL]+\b")
OCTAL = re.compile(r"\b0(?=[0-7]+\b)")
INTEGER_EXPRESSION = re.compile(r"[0-9a-fA-FoxX+\-*/%()<>|&^~ ]+")


@dataclass(slots=True)
class Attribute:
    """One attribute in tokens [begin, end), brackets included, with the text of its argument, if any."""

    name: str
    argument: str | None
    begin: int
    end: int


def attributes(tokens: TokenList, begin: int, end: int) -> list[Attribute]:
    """Return all attributes between two indices that do not lie inside parentheses or braces."""
    found: list[Attribute] = []
    for index in tokens.outer(begin, end):
        if not tokens.is_attribute(index):
            continue
        closing = tokens.partner[index]
        position = index + 2
        while position < closing - 1:
            name = tokens.at(position)
            position += 1
            argument = None
            if tokens.at(position) == "(":
                argument = tokens.text(position + 1, tokens.partner[position])
                position = tokens.partner[position] + 1
            found.append(Attribute(name, argument, index, closing + 1))
            if tokens.at(position) == ",":
                position += 1
    return found


def evaluate(text: str, constants: dict[str, int]) -> int | None:
    """Return the value of an integer constant expression over known names; None where it is not one."""
    text = re.sub(r"\b[A-Za-z_]\w*(?:::\w+)*", lambda m: str(constants.get(m[0], m[0])), text)
    text = OCTAL.sub("0o", INTEGER_SUFFIX.sub("", text))
    if not INTEGER_EXPRESSION.fullmatch(text):
        return None
    try:
        return int(eval(text.replace("/", "//"), {"__builtins__": {}}))  # digits and operators only
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None


def integer_constants(tokens: TokenList) -> dict[str, int]:
    """Return the named integers of a source: constexpr variables with a literal value."""
    known: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token.text == "=" and tokens.kind(index - 1) == "name" and tokens.kind(index + 1) == "number":
            if tokens.at(index + 2) != ";":
                continue
            begin = index
            while begin > 0 and tokens.at(begin - 1) not in (";", "{", "}", ")"):
                begin -= 1
            words = {t.text for t in tokens[begin:index]}
            value = evaluate(tokens.at(index + 1), {})
            if value is not None and "constexpr" in words:
                known[tokens.at(index - 1)] = value
    return known
