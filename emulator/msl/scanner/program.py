"""Translates a Metal source to C++."""

from pathlib import Path

from . import emit
from .declarations import Declaration, declarations
from .kernels import analyze
from .lint import lint
from .preprocess import preprocess
from .rewrite import rewrite
from .selection import NO_MACROS, Macros, select
from .tokens import SourceError, TokenList, tokenize


def translate(
    path: Path, backend: str, metal_version: int, flags: list[str], macros: Macros = NO_MACROS
) -> str:
    """Return the C++ of a Metal source.

    Parameters
    ----------
    path
        A source; local includes are looked up as the preprocessor does.
    backend
        'cpu' for the fiber executor, 'ptx' for NVIDIA GPUs.
    metal_version
        Value of ``__METAL_VERSION__``.
    flags
        Flags of the preprocessor.
    macros
        Macros by which a host may select kernels.

    Raises
    ------
    SourceError
        The source is not Metal, or uses unsupported constructs; the message has file and line.
    """
    tokens, found = _scan(path, metal_version, flags)
    program = analyze(tokens, found)
    rewrite(tokens, found, program, check=False)
    text = emit.unit(tokens, backend) + "\n"
    if backend == "ptx":
        return text + emit.ptx_table(program)
    source = path.read_text(encoding="utf-8")
    names = [entry.host_name for entry in program.instantiations]
    selected_by = select(path, metal_version, flags, macros, names)
    return text + emit.cpu_table(program, path.name, source, macros, selected_by)


def translate_for_check(path: Path, metal_version: int, flags: list[str]) -> tuple[str, list[SourceError]]:
    """Return C++ for the static check, and the constructs that Metal does not support (:mod:`scanner.lint`).

    Raises SourceError as `translate` does.
    """
    tokens, found = _scan(path, metal_version, flags)
    errors = lint(tokens)
    program = analyze(tokens, found)
    rewrite(tokens, found, program, check=True)
    return emit.unit(tokens, "check") + "\n" + emit.check_table(program), errors


def _scan(path: Path, metal_version: int, flags: list[str]) -> tuple[TokenList, list[Declaration]]:
    text = preprocess(str(path), metal_version, flags)
    if "#pragma metal_emulator include" not in text:
        raise SourceError(f"{path}:1: error: #include <metal_stdlib> is missing")
    tokens = tokenize(text, str(path))
    return tokens, list(declarations(tokens))
