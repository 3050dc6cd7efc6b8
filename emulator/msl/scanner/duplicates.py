"""Drops declarations that differ from an earlier one by address space only.

Metal overloads functions and specializes templates by address space. Where the target has one address space,
or a generic one, such declarations coincide: the first is kept.
"""

from .declarations import Declaration
from .kernels import SPACES, split_list
from .tokens import TokenList

IGNORED = frozenset({*SPACES, "inline", "constexpr", "static", "noexcept", "const"})


def drop_duplicates(tokens: TokenList, found: list[Declaration]) -> None:
    """Erase function definitions and class specializations that coincide with an earlier one."""
    seen: set[tuple[tuple[str, ...], int, str]] = set()
    scopes = _scope_numbers(found)
    for declaration in found:
        defaulted = tokens.at(declaration.head_end) == "="  # or deleted
        if declaration.kind == "function" and (declaration.body or defaulted):
            key = _function_key(tokens, declaration)
        elif (
            declaration.kind == "class"
            and declaration.body
            and "<" in (t.text for t in tokens[declaration.begin : declaration.head_end])
        ):
            key = _normalized(tokens, declaration.begin, declaration.head_end)
        else:
            continue
        identity = (declaration.scope, scopes[id(declaration)], key)
        if identity in seen:
            end = declaration.end
            tokens.erase(declaration.begin, end)
        seen.add(identity)


def _scope_numbers(found: list[Declaration]) -> dict[int, int]:
    """Return the innermost class body around each declaration: two classes may share a name."""
    numbers: dict[int, int] = {}
    classes: list[tuple[int, int]] = []
    for declaration in found:
        classes = [body for body in classes if declaration.begin < body[1]]
        numbers[id(declaration)] = classes[-1][0] if classes else -1
        if declaration.kind == "class" and declaration.body:
            classes.append(declaration.body)
    return numbers


def _normalized(tokens: TokenList, begin: int, end: int) -> str:
    """Return the text of a range without address spaces, with ``const`` before the type."""
    words: list[str] = []
    const = False
    index = begin
    while index < end:
        text = tokens[index].text
        if tokens.is_attribute(index):
            index = tokens.partner[index]
        elif text in ("const", "constant"):
            const = True
        elif text in ("*", "&", ",", ")", "(") or text not in IGNORED:
            if text in ("*", "&", ",", ")", ">") and const:
                words.append("const")
                const = False
            words.append(text)
        index += 1
    return " ".join([*words, "const"] if const else words)


def _function_key(tokens: TokenList, declaration: Declaration) -> str:
    """Return the signature without parameter names and initializers."""
    assert declaration.parameters is not None
    opening, closing = declaration.parameters
    parts = [_normalized(tokens, declaration.begin, opening)]
    for begin, end in split_list(tokens, opening + 1, closing):
        stop = next((i for i in range(begin, end) if tokens[i].text == "=" or tokens.is_attribute(i)), end)
        named = (
            stop - begin > 1
            and tokens[stop - 1].kind == "name"
            and tokens[stop - 2].text not in ("::", "typename", *SPACES, "const")
        )
        parts.append(_normalized(tokens, begin, stop - 1 if named else stop))
    trailing = {t.text for t in tokens[closing + 1 : declaration.head_end]}
    parts.append("const" if "const" in trailing else "")
    return " | ".join(parts)
