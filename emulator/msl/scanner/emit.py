"""Writes the C++ translation unit of a rewritten source."""

from .kernels import Argument, Instantiation, Program
from .selection import Macros
from .tokens import TokenList


def raw_string(text: str) -> str:
    """Return a text as raw string literals of limited length."""
    delimiter = "MSL"
    while f"){delimiter}" in text:
        delimiter += "_"
    pieces = [text[start : start + 16000] for start in range(0, len(text), 16000)] or [""]
    return "\n".join(f'R"{delimiter}({piece}){delimiter}"' for piece in pieces)


def parameter(argument: Argument) -> str:
    """Return the template argument that describes a parameter of a kernel."""
    return f"::msl::Parameter<::msl::Role::{argument.kind}, {max(argument.index, 0)}>"


def unit(tokens: TokenList, backend: str) -> str:
    """Return the prologue and the rewritten source, inside an anonymous namespace.

    For the static check, only the source: C++ for OpenCL supports no unnamed namespace with initialized
    constant objects, so the prologue is compiled separately.
    """
    if backend == "check":
        return tokens.render()
    prologue = [f"#define MSL_{backend.upper()} 1", '#include "abi.h"']
    return "\n".join([*prologue, "namespace {", '#include "msl.h"', tokens.render(), "}  // namespace"])


def check_table(program: Program) -> str:
    """Return assertions on the parameters of every kernel, for the static check."""
    lines = []
    for entry in program.instantiations:
        described = ", ".join(parameter(a) for a in entry.kernel.arguments)
        lines.append(f'#line {entry.place.line} "{entry.place.file}"')
        arguments = f"decltype({entry.expression})" + (f", {described}" if described else "")
        lines.append(f'static_assert(::msl::Checked<{arguments}>::value, "{entry.host_name}");')
    return "\n".join(lines) + "\n"


def cpu_table(program: Program, name: str, source: str, macros: Macros, selected_by: dict[str, str]) -> str:
    """Return the kernel table and its registration.

    Parameters
    ----------
    name
        File name of the source, by which the host identifies the library.
    source
        Exact text that the host gives to newLibraryWithSource.
    macros, selected_by
        Macros that a host may define, and for each kernel that a macro restores, that macro.
    """
    lines = ["namespace {", "namespace msl_table {", "using namespace ::metal_emulator::abi;"]
    rows = []
    for number, entry in enumerate(program.instantiations):
        described = "".join(f", {parameter(a)}" for a in entry.kernel.arguments)
        lines.append(f'#line {entry.place.line} "{entry.place.file}"')
        lines.append(f"using Entry{number} = ::msl::Entry<&{entry.expression}{described}>;")
        lines += _arguments(entry, number)
        bindings = sum(a.kind in ("buffer", "threadgroup") for a in entry.kernel.arguments)
        rows.append(
            f'    {{"{entry.host_name}", {{kArguments{number}, {bindings}}}, '
            f"{entry.kernel.max_threads}, &Entry{number}::call, Entry{number}::layout, "
            f"{_text(selected_by.get(entry.host_name))}}},"
        )
    lines += ["const Kernel kKernels[] = {", *rows, "    {}};"]
    lines += [f"const char kSource[] =\n{raw_string(source)};"]
    lines += [f"const char* const kSelectors[] = {{{', '.join(map(_text, [*macros.selectors, None]))}}};"]
    lines += [
        f'const Library kLibrary = {{"{name}", {{kSource, sizeof(kSource) - 1}}, {{kKernels, {len(rows)}}}, '
        f"MSL_CHECKED, {_text(macros.guard)}, {{kSelectors, "
        f"{len(macros.selectors)}}}, __METAL_VERSION__}};",
        "struct Registration {",
        "  Registration() { metal_emulator_register(&kLibrary); }",
        "} registration;",
        "}  // namespace msl_table",
        "}  // namespace",
    ]
    return "\n".join(lines) + "\n"


def ptx_table(program: Program) -> str:
    """Return the entries of the kernels, numbered in the order of the kernel table."""
    lines = []
    for number, entry in enumerate(program.instantiations):
        described = "".join(f", {parameter(a)}" for a in entry.kernel.arguments)
        constants = sum(1 << i for i, a in enumerate(entry.kernel.arguments) if a.space == "constant")
        lines.append(f'#line {entry.place.line} "{entry.place.file}"')
        lines.append(f"MSL_ENTRY({number}, &{entry.expression}, {constants}u{described})")
    return "\n".join(lines) + "\n"


def _text(value: str | None) -> str:
    return "nullptr" if value is None else f'"{value}"'


def _arguments(entry: Instantiation, number: int) -> list[str]:
    rows = []
    for position, argument in enumerate(entry.kernel.arguments):
        if argument.kind not in ("buffer", "threadgroup"):
            continue
        space = f"Argument::Space::k{argument.space.capitalize()}"
        writable = f"Entry{number}::writable[{position}]" if argument.space == "device" else "false"
        entry_name = f"Entry{number}"
        rows.append(
            f'    {{{space}, {argument.index}, "{argument.name}", {writable}, '
            f"{entry_name}::bytes[{position}], "
            f"{entry_name}::alignment[{position}], {entry_name}::reference[{position}]}},"
        )
    return [f"const Argument kArguments{number}[] = {{", *rows, "    {}};"]
