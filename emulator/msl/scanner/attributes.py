"""Attributes ``[[...]]`` and their integers."""

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
    """Return all attributes between two indices that are not inside parentheses or braces."""
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


def evaluate(text: str) -> int | None:
    """Return the value of an expression of integer literals; None for anything else."""
    text = OCTAL.sub("0o", INTEGER_SUFFIX.sub("", text))
    if not INTEGER_EXPRESSION.fullmatch(text):
        return None
    try:
        return int(eval(text.replace("/", "//"), {"__builtins__": {}}))  # digits and operators only
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None
