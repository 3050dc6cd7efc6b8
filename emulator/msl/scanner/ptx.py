"""Splits the assembly of a source for NVIDIA GPUs: one module for each kernel.

The driver compiles a module when it is loaded: with one module per kernel, it compiles only used kernels.
"""

import re

from .tokens import SourceError

# Placeholder for an instruction with which a kernel waits for the previous one.
AWAIT = "// await"
NAME = re.compile(r"[A-Za-z_$%][\w$]*")
ENTRY = re.compile(r"\.entry\s+(\w+)")
VARIABLES = (".global", ".const", ".visible .global", ".visible .const")
VARIABLE = re.compile(
    r"\.(?:global|shared|const)\b.*?([A-Za-z_$][\w$]*)\s*(?:\[[^\]]*\])*\s*(?:=.*)?;\s*$", re.S
)


def _statements(assembly: str) -> list[str]:
    """Return the outermost level: declarations, and functions with their bodies."""
    statements, begin, depth = [], 0, 0
    text = re.sub(r"//[^\n]*", lambda m: m[0] if m[0] == AWAIT else "", assembly)
    for position, character in enumerate(text):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0 and not text[begin:position].lstrip().startswith(VARIABLES):
                statements.append(text[begin : position + 1].strip())
                begin = position + 1
        elif depth == 0 and character == ";":
            statements.append(text[begin : position + 1].strip())
            begin = position + 1
    return statements


def split(assembly: str, source: str) -> dict[str, str]:
    """Return a module with only its variables for each entry, by name.

    Raises
    ------
    SourceError
        The source calls a function without a definition, such as one of the C library. Others are inlined.
    """
    header: list[str] = []
    rest: list[str] = []
    for line in assembly.splitlines():
        directive = line.lstrip().startswith((".version", ".target", ".address_size"))
        (header if directive else rest).append(line)
    entries: dict[str, str] = {}
    variables: dict[str, str] = {}
    for text in _statements("\n".join(rest)):
        head = text.split("{", 1)[0]
        if match := ENTRY.search(head):
            entries[match[1]] = text
        elif match := VARIABLE.search(text):
            variables[match[1]] = text
        else:
            raise SourceError(f"{source}: neither a kernel nor a variable in the assembly: {text[:200]}")
    modules = {}
    for entry, body in entries.items():
        names = set(NAME.findall(body))
        needed = [text for name, text in variables.items() if name in names]
        modules[entry] = "\n".join([*header, *needed, body]) + "\n"
    return modules
