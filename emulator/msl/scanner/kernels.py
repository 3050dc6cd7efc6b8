"""Finds kernels, their arguments and instantiations."""

import re
from dataclasses import dataclass, field

from .attributes import Attribute, attributes, evaluate
from .declarations import Declaration
from .tokens import SourceError, Token, TokenList

SPACES = ("device", "constant", "threadgroup", "thread")
BUILTINS = (
    "thread_position_in_grid",
    "threads_per_grid",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
)
KERNEL_ATTRIBUTES = ("kernel", "host_name", "max_total_threads_per_threadgroup")
MAX_BUFFERS = 31


@dataclass(slots=True)
class Argument:
    """A parameter of a kernel: a buffer, threadgroup memory or a built-in value.

    ``kind`` is 'buffer', 'threadgroup' or the name of the built-in.
    """

    name: str
    kind: str
    index: int
    space: str


@dataclass(slots=True)
class Kernel:
    """A kernel or kernel template; ``max_threads`` is 0 if no limit is given."""

    name: str
    scope: tuple[str, ...]
    place: Token  # the first one
    arguments: list[Argument]
    declaration: Declaration
    max_threads: int
    template_arguments: str | None
    host_name: str | None

    @property
    def path(self) -> str:
        """Return the fully qualified name, which cannot refer to a function of metal_stdlib."""
        return "::".join(("", *self.scope, self.name))


@dataclass(slots=True)
class Instantiation:
    """A kernel that the host can name: a kernel itself, or an instantiation of a kernel template."""

    host_name: str
    expression: str
    place: Token
    kernel: Kernel


@dataclass(slots=True)
class Program:
    """Kernels that a source offers to the host."""

    kernels: list[Kernel] = field(default_factory=list)
    instantiations: list[Instantiation] = field(default_factory=list)


def analyze(tokens: TokenList, found: list[Declaration]) -> Program:
    """Return the kernels among the declarations of a source."""
    program = Program()
    for declaration in found:
        if is_kernel(tokens, declaration) and declaration.body:
            program.kernels.append(_kernel(tokens, declaration))
    by_name = {kernel.name: kernel for kernel in program.kernels}
    for kernel in program.kernels:
        if kernel.template_arguments is None:
            host_name = kernel.host_name or kernel.name
            program.instantiations.append(Instantiation(host_name, kernel.path, kernel.place, kernel))
    for declaration in found:
        if declaration.instantiation and is_kernel(tokens, declaration):
            program.instantiations.append(_instantiation(tokens, declaration, by_name))
    names: dict[str, Instantiation] = {}
    for instantiation in program.instantiations:
        if instantiation.host_name in names:
            raise instantiation.place.error(f"two kernels named '{instantiation.host_name}'")
        names[instantiation.host_name] = instantiation
    return program


def is_kernel(tokens: TokenList, declaration: Declaration) -> bool:
    """Whether the head contains ``kernel`` or ``[[kernel]]`` before the name."""
    for index in tokens.outer(declaration.head, declaration.head_end):
        if tokens[index].text == "(":
            return False
        found = attributes(tokens, index, index + 1)
        if tokens[index].text == "kernel" or any(a.name in ("kernel", "host_name") for a in found):
            return True
    return False


def _head_attributes(tokens: TokenList, declaration: Declaration) -> list[Attribute]:
    end = declaration.body[0] if declaration.body else declaration.end
    return attributes(tokens, declaration.head, end)


def _host_name(found: list[Attribute]) -> str | None:
    for attribute in found:
        if attribute.name == "host_name":
            return "".join(re.findall(r'"([^"]*)"', attribute.argument or ""))
    return None


def _kernel(tokens: TokenList, declaration: Declaration) -> Kernel:
    assert declaration.parameters is not None
    opening, closing = declaration.parameters
    name = tokens.at(opening - 1)
    if tokens.at(opening - 2) != "void":
        raise tokens[opening - 1].error(f"kernel '{name}' must return void")
    max_threads = 0
    for attribute in _head_attributes(tokens, declaration):
        if attribute.name not in KERNEL_ATTRIBUTES:
            raise tokens[attribute.begin].error(f"kernel '{name}': unknown attribute '{attribute.name}'")
        if attribute.name == "max_total_threads_per_threadgroup":
            max_threads = evaluate(attribute.argument or "") or 0
    arguments = [
        _argument(tokens, begin, end, name) for begin, end in split_list(tokens, opening + 1, closing)
    ]
    _check_indices(tokens, declaration, name, arguments)
    templates = _template_arguments(tokens, declaration) if declaration.templates else None
    host_name = _host_name(_head_attributes(tokens, declaration))
    return Kernel(
        name,
        declaration.scope,
        tokens[declaration.head],
        arguments,
        declaration,
        max_threads,
        templates,
        host_name,
    )


def split_list(tokens: TokenList, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges between commas of a parameter or argument list."""
    ranges, start = [], begin
    for index in tokens.outer(begin, end):
        if tokens[index].text == ",":
            ranges.append((start, index))
            start = index + 1
    if start < end:
        ranges.append((start, end))
    return ranges


def _argument(tokens: TokenList, begin: int, end: int, kernel: str) -> Argument:
    def error(message: str) -> SourceError:
        return tokens[begin].error(f"kernel '{kernel}': {message}")

    found = attributes(tokens, begin, end)
    stop = found[0].begin if found else end
    words = [token.text for token in tokens[begin:stop]]
    name, text = tokens.at(stop - 1), tokens.text(begin, stop)
    space = next((word for word in words if word in SPACES), "")
    pointer = "*" in words or "&" in words
    kind, index = "", -1
    for attribute in found:
        if attribute.name in ("buffer", "threadgroup"):
            value = evaluate(attribute.argument or "")
            if value is None:
                raise error(f"index of '{name}' is not an integer constant: {attribute.argument}")
            if not 0 <= value < MAX_BUFFERS:
                raise error(f"{attribute.name}({value}) of '{name}' is not in 0 to 30")
            index = value
        elif attribute.name not in BUILTINS:
            raise error(f"'{name}' has the unknown attribute '{attribute.name}'")
        if kind:
            raise error(f"'{name}' is both [[{kind}]] and [[{attribute.name}]]")
        kind = attribute.name
    if not kind:
        raise error(f"'{text}' needs an attribute, such as [[buffer(0)]]")
    if kind in ("buffer", "threadgroup") and not pointer:
        raise error(f"[[{kind}]] argument '{text}' must be a pointer or a reference")
    if kind == "buffer" and space not in ("device", "constant"):
        raise error(f"[[buffer]] argument '{text}' must be device or constant")
    if kind == "threadgroup" and space != "threadgroup":
        raise error(f"[[threadgroup]] argument '{text}' must be threadgroup")
    return Argument(name, kind, index, space)


def _check_indices(
    tokens: TokenList, declaration: Declaration, kernel: str, arguments: list[Argument]
) -> None:
    """Reject an index used twice."""
    taken: dict[tuple[str, int], str] = {}
    for argument in arguments:
        if argument.kind not in ("buffer", "threadgroup"):
            continue
        if other := taken.get((argument.kind, argument.index)):
            place = f"{argument.kind}({argument.index})"
            raise tokens[declaration.head].error(
                f"kernel '{kernel}': {place} is both '{other}' and '{argument.name}'"
            )
        taken[argument.kind, argument.index] = argument.name


def _template_arguments(tokens: TokenList, declaration: Declaration) -> str:
    """Return the parameters of the innermost template head as arguments: ``<T, N>``."""
    opening, closing = declaration.templates[-1]
    names = []
    for begin, end in split_list(tokens, opening + 1, closing):
        stop = next((i for i in range(begin, end) if tokens[i].text == "="), end)
        names.append(tokens.at(stop - 1))
    return f"<{', '.join(names)}>"


def _instantiation(tokens: TokenList, declaration: Declaration, kernels: dict[str, Kernel]) -> Instantiation:
    for index in tokens.outer(declaration.head, declaration.end - 1):
        closing = tokens.closing_angle(index)
        if closing is None or tokens.at(index - 1) not in kernels or tokens.at(closing + 1) not in ("(", ";"):
            continue
        kernel = kernels[tokens.at(index - 1)]
        host_name = _host_name(_head_attributes(tokens, declaration))
        return Instantiation(
            host_name or kernel.name + tokens.text(index, closing + 1),
            kernel.path + tokens.written(index, closing + 1),
            tokens[index - 1],
            kernel,
        )
    raise tokens[declaration.begin].error("instantiation of an unknown kernel template")
