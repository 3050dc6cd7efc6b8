"""Rewrites the parts of Metal that are not C++. Passes run in the order of ``rewrite``."""

import re

from .casts import CastRewriter
from .declarations import Declaration
from .kernels import Kernel, Program, is_kernel
from .tokens import TokenList

OPENCL_SPACES = {
    "device": "__global",
    "constant": "const __constant",
    "threadgroup": "__local",
    "thread": "__private",
}
OPENCL_KEYWORDS = ("global", "local", "generic", "pipe", "read_only", "write_only", "read_write", "event_t")
ERASED_SPACES = {"device": "", "constant": "const", "threadgroup": "", "thread": ""}
FLOAT_LITERAL = re.compile(r"(?P<value>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)(?P<suffix>[fFhH])?")


def rewrite(tokens: TokenList, found: list[Declaration], program: Program, check: bool) -> None:
    """Turn a Metal source into C++, or with ``check`` into C++ for OpenCL, which keeps address spaces."""
    bodies = [d.body for d in found if d.kind == "function" and d.body]
    _literals(tokens, check)
    CastRewriter(tokens).rewrite(bodies)
    if check:
        _opencl_keywords(tokens)
    _address_spaces(tokens, check)
    _threadgroup_variables(tokens, program)
    _attributes(tokens)
    _kernels(tokens, found)


def _literals(tokens: TokenList, check: bool) -> None:
    """Make unsuffixed floating literals float, as Metal does, and give half literals their C++ suffix."""
    for token in tokens:
        if token.kind != "number" or token.text[:2] in ("0x", "0X", "0b", "0B"):
            continue
        match = FLOAT_LITERAL.fullmatch(token.text)
        if match is None or (match["suffix"] is None and not re.search(r"[.eE]", token.text)):
            continue
        value, suffix = match["value"], (match["suffix"] or "f").lower()
        if "." not in value and "e" not in value.lower():
            value += ".0"
        if suffix == "h":
            token.out = value + ("h" if check else "f16")
        else:
            token.out = value + "f"


def _opencl_keywords(tokens: TokenList) -> None:
    """Rename identifiers that are keywords in OpenCL."""
    for token in tokens:
        if token.text in OPENCL_KEYWORDS:
            token.out = f"msl_{token.text}"


def _address_spaces(tokens: TokenList, check: bool) -> None:
    """Translate or erase address spaces."""
    for index, token in enumerate(tokens):
        if token.text not in ERASED_SPACES or tokens.at(index - 1) in (".", "->", "::"):
            continue
        if tokens.at(index - 1) == "[" or tokens.at(index + 1) in ("(", "]"):
            continue  # an attribute
        head_end = index - 1 - (tokens.at(index - 1) == "const")
        if tokens.at(head_end) == ")" and tokens.at(index + 1) in ("{", ":", ";", "=", "const", "noexcept"):
            raise token.error("member functions with an address space are not modelled")
        token.out = (OPENCL_SPACES if check else ERASED_SPACES)[token.text]


def _threadgroup_variables(tokens: TokenList, program: Program) -> None:
    """Turn threadgroup variables of kernels into references to the memory of the running threadgroup."""
    inside: dict[int, Kernel] = {}
    for kernel in program.kernels:
        assert kernel.declaration.body is not None
        for index in range(*kernel.declaration.body):
            inside[index] = kernel
    for index, token in enumerate(tokens):
        before = tokens.at(index - 1)
        if token.text != "threadgroup" or before not in (";", "{", "}", ")", "const", "constexpr"):
            continue
        pointer = False
        for end in tokens.outer(index, len(tokens)):
            if tokens[end].text in (";", "{", "}", "(", ")", "="):
                break
            pointer = pointer or tokens[end].text in ("*", "&")
        if pointer or tokens.at(end) in ("{", "}", "(", ")"):
            continue
        if index not in inside:
            raise token.error("a threadgroup variable must be declared in a kernel")
        if tokens.at(end) == "=":
            raise token.error("a threadgroup variable cannot have an initializer")
        _threadgroup_variable(tokens, index, end, inside[index])


def _threadgroup_variable(tokens: TokenList, index: int, end: int, kernel: Kernel) -> None:
    """Rewrite ``threadgroup T a[2], b;``; index is at ``threadgroup``, end at the semicolon."""
    position = index + 1
    while position < end:  # the type ends before the first name followed by a bracket, comma or semicolon
        if (closing := tokens.closing_angle(position)) is not None:
            position = closing
        elif tokens.kind(position) == "name" and (
            tokens.at(position + 1) in ("[", ",") or position + 1 == end
        ):
            break
        position += 1
    kind = tokens.written(index + 1, position)
    declared = []
    while position < end:
        name, start = tokens[position].out, position + 1
        while position + 1 < end and tokens.at(position + 1) == "[" and not tokens.is_attribute(position + 1):
            position = tokens.partner[position + 1]
        dimensions = tokens.written(start, position + 1)
        owner = kernel.path + (kernel.template_arguments or "")
        declared.append(f"MSL_THREADGROUP_VARIABLE({name}, ({dimensions}), ({owner}), {kind})")
        position += 1
        while position < end and tokens.at(position) != ",":
            position += 1  # attributes
        position += 1
    tokens.erase(index, end)
    tokens[index].out = "; ".join(declared)


def _kernels(tokens: TokenList, found: list[Declaration]) -> None:
    """Make kernels plain functions, and erase their instantiations: the kernel table instantiates them."""
    for declaration in found:
        if not is_kernel(tokens, declaration):
            continue
        if declaration.instantiation:
            tokens.erase(declaration.begin, declaration.end)
            continue
        for token in tokens[declaration.head : declaration.head_end]:
            if token.text == "kernel":
                token.out = ""


def _attributes(tokens: TokenList) -> None:
    """Erase ``[[...]]``: their contents are in the kernel table."""
    for index in range(len(tokens)):
        if tokens.is_attribute(index):
            tokens.erase(index, tokens.partner[index] + 1)
