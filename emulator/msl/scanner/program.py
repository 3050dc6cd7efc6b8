"""From a Metal source to C++: the steps in order."""

import re
from pathlib import Path

from . import emit, selection
from .declarations import Declaration, declarations
from .kernels import Program, analyze
from .lint import lint
from .preprocess import preprocess
from .rewrite import rewrite
from .tokens import SourceError, TokenList, tokenize


def translate(
    path: Path, backend: str, metal_version: int, flags: list[str], macros: selection.Macros | None = None
) -> str:
    """Return the C++ of a Metal source.

    Parameters
    ----------
    path
        A source; local includes are looked up as the preprocessor does.
    backend
        'cpu' for the fiber executor, 'ptx' for NVIDIA GPUs, 'check' for the static check.
    metal_version
        Value of ``__METAL_VERSION__``.
    flags
        Flags of the preprocessor.
    macros
        Those by which a host may select kernels.

    Raises
    ------
    SourceError
        The source is not Metal, or uses unsupported constructs; the message has file and line.
    """
    tokens, directives = tokenize(preprocess(str(path), metal_version, flags), str(path))
    check_directives(path, directives)
    found = list(declarations(tokens))
    program = analyze(tokens, found)
    uses = constant_uses(tokens, found, program)
    rewrite(tokens, found, program, check=backend == "check")
    text = emit.unit(tokens, backend, program) + "\n"
    if backend == "check":
        return text + emit.check_table(program)
    if backend == "ptx":
        return text + emit.ptx_table(program)
    source = path.read_text(encoding="utf-8")
    names = [entry.host_name for entry in program.instantiations]
    selected = selection.select(path, metal_version, flags, macros, names) if macros else None
    return text + emit.cpu_table(program, path.name, source, uses, selected)


def lints(path: Path, metal_version: int, flags: list[str]) -> list[SourceError]:
    """Return the constructs of a source that Metal does not support; see :mod:`scanner.lint`."""
    tokens, _ = tokenize(preprocess(str(path), metal_version, flags), str(path))
    return lint(tokens, list(declarations(tokens)))


def check_directives(path: Path, directives: list[tuple[str, int, str]]) -> None:
    """Refuse a source without Metal's standard library."""
    if not any("metal_emulator include" in text for _, _, text in directives):
        raise SourceError(f"{path}:1: error: #include <metal_stdlib> is missing")


def constant_uses(tokens: TokenList, found: list[Declaration], program: Program) -> dict[str, list[int]]:
    """Return for each kernel the function constants that must have a value.

    Those are the ones that the kernel, or its callees, may read. A name selects all functions, classes and
    variables with that name, so the result may be too large but never too small. Constants that the source
    queries with is_function_constant_defined are omitted.
    """
    tested = {
        tokens.at(i + 2) for i, token in enumerate(tokens) if token.text == "is_function_constant_defined"
    }
    indices = {constant.name: constant.index for constant in program.constants if constant.name not in tested}
    names: dict[str, set[str]] = {}
    for declaration in found:
        if declaration.kind in ("namespace", "alias"):
            continue
        words = {t.text for t in tokens[declaration.begin : declaration.end] if t.kind == "name"}
        for name in _declared_names(tokens, declaration):
            names.setdefault(name, set()).update(words)
    uses = {}
    for kernel in program.kernels:
        reached, pending = {kernel.name}, [kernel.name]
        for entry in program.instantiations:
            if entry.kernel is kernel:  # template arguments may name functions
                pending += re.findall(r"\w+", entry.expression)
        while pending:
            for word in names.get(pending.pop(), ()):
                if word not in reached:
                    reached.add(word)
                    pending.append(word)
        optional = {a.condition for a in kernel.arguments if a.condition}
        uses[kernel.name] = sorted({indices[name] for name in reached | optional if name in indices})
    return uses


def _declared_names(tokens: TokenList, declaration: Declaration) -> list[str]:
    if declaration.kind == "function":
        assert declaration.parameters is not None
        return [tokens.at(declaration.parameters[0] - 1)]
    end = next(
        (i for i in range(declaration.head, declaration.head_end) if tokens.at(i) == "["),
        declaration.head_end,
    )
    head = [t for t in tokens[declaration.head : end] if t.kind == "name"]
    if declaration.kind == "class":
        return [t.text for t in head[1:2]]
    names = [t.text for t in head[-1:]]
    if declaration.kind == "enum" and declaration.body:
        names += [t.text for t in tokens[declaration.body[0] : declaration.body[1]] if t.kind == "name"]
    return names
