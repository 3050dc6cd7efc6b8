"""Splits a token list into the declarations of its namespaces and classes."""

from collections.abc import Iterator
from dataclasses import dataclass

from .tokens import TokenList

KINDS = {"using": "alias", "typedef": "alias", "namespace": "namespace", "enum": "enum",
         "struct": "class", "class": "class"}  # fmt: skip
NOT_SCOPES = ("struct", "class", "namespace", "inline")
NOT_PARAMETERS = ("decltype", "sizeof")  # their parentheses contain none


@dataclass(slots=True)
class Declaration:
    """A declaration in tokens [begin, end)."""

    kind: str  # 'namespace', 'class', 'enum', 'alias' (using, typedef), 'function' or 'variable'
    begin: int
    end: int
    head: int  # index of the first token after template heads
    head_end: int  # index of the token that ends the head: ``{``, ``;`` or ``=``
    body: tuple[int, int] | None  # braces of a function, class, enum or namespace
    scope: tuple[str, ...]  # names of the enclosing namespaces and classes
    # ``<`` and ``>`` of each template head; empty for ``template`` without parameters.
    templates: list[tuple[int, int]]
    instantiation: bool
    parameters: tuple[int, int] | None  # parentheses of a function's parameters


def declarations(tokens: TokenList) -> Iterator[Declaration]:
    """Yield every declaration at namespace or class scope, outer ones first."""
    yield from _declarations(tokens, 0, len(tokens), ())


def _declarations(tokens: TokenList, begin: int, end: int, scope: tuple[str, ...]) -> Iterator[Declaration]:
    index = begin
    while index < end:
        if tokens[index].text == ";":
            index += 1
            continue
        if tokens[index].text in ("public", "private") and tokens.at(index + 1) == ":":
            index += 2
            continue
        found = _declaration(tokens, index, end, scope)
        yield found
        if found.kind in ("namespace", "class") and found.body:
            name = _scope_name(tokens, found)
            yield from _declarations(tokens, found.body[0] + 1, found.body[1], (*scope, *name))
        index = found.end


def _scope_name(tokens: TokenList, found: Declaration) -> tuple[str, ...]:
    """Return the name that a namespace or class adds to qualified names; none if it is anonymous."""
    assert found.body is not None
    names = []
    for index in tokens.outer(found.head, found.body[0]):
        if tokens[index].text == ":":
            break
        if tokens[index].kind == "name" and tokens[index].text not in NOT_SCOPES:
            names.append(tokens[index].text)
    return tuple(names) if found.kind == "namespace" else tuple(names[:1])


def _declaration(tokens: TokenList, begin: int, end: int, scope: tuple[str, ...]) -> Declaration:
    """Parse the one declaration that starts here."""
    index, templates, instantiation = begin, [], False
    while tokens.at(index) == "template":
        if tokens.at(index + 1) == "<":
            closing = tokens.closing_angle(index + 1, certain=True)
            if closing is None:
                raise tokens[index].error("template parameters without end")
            templates.append((index + 1, closing))
            index = closing + 1
        else:
            instantiation = True
            index += 1
    head = index
    first = _first_word(tokens, head, end)
    kind = KINDS.get(first, "")
    head_end, parameters = _end_of_head(tokens, kind, head, end)
    if kind == "class" and parameters is not None:
        kind = ""  # a function that returns a struct by elaborated name
    if not kind:
        kind = "function" if parameters is not None else "variable"
    body = None
    if kind in ("function", "namespace", "class", "enum") and tokens.at(head_end) == "{":
        body = (head_end, tokens.partner[head_end])
    if body and kind in ("namespace", "function"):
        stop = body[1]
    else:
        stop = next((i for i in tokens.outer(head_end, end) if tokens[i].text == ";"), end)
    return Declaration(
        kind, begin, stop + 1, head, head_end, body, scope, templates, instantiation, parameters
    )


def _first_word(tokens: TokenList, index: int, end: int) -> str:
    while index < end and (
        tokens.is_attribute(index) or tokens.at(index) in ("inline", "static", "constexpr", "const")
    ):
        index = tokens.partner[index] + 1 if tokens.is_attribute(index) else index + 1
    return tokens.at(index)


def _end_of_head(tokens: TokenList, kind: str, head: int, end: int) -> tuple[int, tuple[int, int] | None]:
    """Return the end of a head, and the parentheses of parameters; the kind may still be open ('')."""
    index, parameters = head, None
    while index < end:
        text = tokens[index].text
        if text == "operator":
            index = tokens.partner.get(index + 1, index + 1)  # the end of operator() and operator[]
        elif (closing := tokens.closing_angle(index)) is not None and closing < end:
            index = closing
        elif text == "(":
            if parameters is None and tokens.at(index - 1) not in NOT_PARAMETERS and kind in ("", "class"):
                parameters = (index, tokens.partner[index])
            index = tokens.partner[index]
        elif text == "[":
            index = tokens.partner[index]
        elif text in (";", "{", "="):
            return index, parameters
        index += 1
    raise tokens[head].error(f"declaration without end: {tokens.text(head, min(head + 12, end))} ...")
