"""Splits the assembly of a source for NVIDIA GPUs: one module for each kernel.

The driver compiles a module when it is loaded. With a module for each kernel it compiles those that are used.
"""

import re

from .tokens import SourceError

# The place at which the executor may let a kernel wait for the previous one.
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
    """Return for the name of each entry a module with its variables, and nothing else.

    Raises
    ------
    SourceError
        There is a function: kernels contain all that they call, so that this one has no definition, such as
        one of the C library.
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
