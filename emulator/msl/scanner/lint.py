"""Finds in the tokens of a source what Metal forbids and a C++ compiler would accept."""

from .declarations import Declaration
from .kernels import is_kernel
from .tokens import SourceError, TokenList

NOT_METAL = {
    "double": "Metal has no double",
    "goto": "Metal has no goto",
    "new": "Metal has no dynamic memory",
    "delete": "Metal has no dynamic memory",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "virtual": "Metal has no virtual functions",
    "dynamic_cast": "Metal has no run-time types",
    "typeid": "Metal has no run-time types",
    "thread_local": "Metal has no thread_local",
    "std": "Metal has no std namespace",
    "asm": "Metal has no inline assembly",
    "wchar_t": "Metal has no wchar_t",
    "printf": "Metal has no printf",
    "malloc": "Metal has no dynamic memory",
    "free": "Metal has no dynamic memory",
    "memcpy": "Metal has no memcpy",
    "memset": "Metal has no memset",
}
C_FUNCTIONS = ("expf", "exp2f", "logf", "log2f", "sqrtf", "powf", "sinf", "cosf", "tanhf", "fabsf",
               "fmaxf", "fminf", "floorf", "ceilf", "roundf")  # fmt: skip


def lint(tokens: TokenList, found: list[Declaration]) -> list[SourceError]:
    """Return every violation."""
    return [*_words(tokens), *_literals(tokens), *_globals(tokens, found), *_statics(tokens, found)]


def _words(tokens: TokenList) -> list[SourceError]:
    errors = []
    for index, token in enumerate(tokens):
        if token.kind != "name" or tokens.at(index - 1) in (".", "->"):
            continue
        if token.text in NOT_METAL:
            errors.append(token.error(f"'{token.text}': {NOT_METAL[token.text]}"))
        elif token.text.startswith("__builtin"):
            errors.append(token.error(f"'{token.text}' is not a function of Metal"))
        elif token.text in C_FUNCTIONS and tokens.at(index + 1) == "(":
            errors.append(token.error(f"'{token.text}' is not a function of Metal; use '{token.text[:-1]}'"))
        elif token.text == "long" and tokens.at(index + 1) in ("double", "long"):
            errors.append(token.error(f"'long {tokens.at(index + 1)}' is not a type of Metal"))
    return errors


def _literals(tokens: TokenList) -> list[SourceError]:
    errors = []
    for token in tokens:
        hexadecimal = token.text[:2] in ("0x", "0X")
        if token.kind == "number" and "." in token.text and token.text[-1] in "lL" and not hexadecimal:
            errors.append(token.error(f"'{token.text}': Metal has no long double"))
        if token.kind == "number" and token.text.lower().rstrip("u").endswith("ll"):
            errors.append(token.error(f"'{token.text}': Metal has no long long"))
    return errors


def _globals(tokens: TokenList, found: list[Declaration]) -> list[SourceError]:
    """Return variables at namespace scope outside of the constant address space."""
    classes = [d.body for d in found if d.kind == "class" and d.body]
    errors = []
    for declaration in found:
        if declaration.kind != "variable" or is_kernel(tokens, declaration):
            continue
        if any(opening < declaration.begin < closing for opening, closing in classes):
            continue
        words = [t.text for t in tokens[declaration.head : declaration.head_end]]
        if not words or words[0] in ("static_assert", "extern", "friend") or "constant" in words:
            continue
        if declaration.instantiation or "operator" in words or "constexpr" in words:
            continue
        errors.append(
            tokens[declaration.head].error(
                f"'{' '.join(words)}': a variable at namespace scope must be in the constant address space"
            )
        )
    return errors


def _statics(tokens: TokenList, found: list[Declaration]) -> list[SourceError]:
    """Return static variables in functions."""
    errors = []
    for declaration in found:
        if declaration.kind != "function" or not declaration.body:
            continue
        for index in range(*declaration.body):
            around = (tokens.at(index - 1), tokens.at(index + 1), tokens.at(index + 2))
            if tokens[index].text == "static" and "constexpr" not in around and "constant" not in around:
                errors.append(tokens[index].error("Metal has no static variables in functions"))
    return errors
