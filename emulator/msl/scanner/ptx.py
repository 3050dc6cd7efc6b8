"""Splits the assembly of a source for NVIDIA GPUs: one module for each kernel.

The driver compiles a module when it is loaded. With a module for each kernel it compiles those that are used.
"""

import re
from dataclasses import dataclass

from .tokens import SourceError

# The place at which the executor may let a kernel wait for the previous one.
AWAIT = "// await"
NAME = re.compile(r"[A-Za-z_$%][\w$]*")
ENTRY = re.compile(r"\.entry\s+(\w+)")
FUNCTION = re.compile(r"\.func\b(?:\s*\([^)]*\))?\s*([\w$]+)")
VARIABLES = (".global", ".const", ".visible .global", ".visible .const")
VARIABLE = re.compile(
    r"\.(?:global|shared|const)\b.*?([A-Za-z_$][\w$]*)\s*(?:\[[^\]]*\])*\s*(?:=.*)?;\s*$", re.S
)


@dataclass(slots=True)
class _Item:
    name: str
    text: str
    entry: bool
    external: bool

    def names(self) -> set[str]:
        return set(NAME.findall(self.text))


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
    """Return for the name of each entry a module with all that it needs, and nothing else.

    Raises
    ------
    SourceError
        An entry needs a function that no GPU and no header has, such as one of the C library.
    """
    header: list[str] = []
    rest: list[str] = []
    for line in assembly.splitlines():
        directive = line.lstrip().startswith((".version", ".target", ".address_size"))
        (header if directive else rest).append(line)
    items: dict[str, _Item] = {}
    for text in _statements("\n".join(rest)):
        head = text.split("{", 1)[0]
        if match := ENTRY.search(head):
            items[match[1]] = _Item(match[1], text, True, False)
        elif match := FUNCTION.search(head) or VARIABLE.search(text):
            known = items.get(match[1])
            declaration = text.endswith(";") and ".func" in head
            if known and declaration:
                continue
            external = ".extern" in head and "msl_threadgroup_memory" not in text
            items[match[1]] = _Item(match[1], text, False, external)
        else:
            raise SourceError(f"{source}: not understood in the assembly: {text[:200]}")
    modules = {}
    for entry in (item for item in items.values() if item.entry):
        needed, pending = {entry.name}, [entry]
        while pending:
            for name in pending.pop().names() & items.keys() - needed:
                if items[name].external:
                    raise SourceError(f"{source}: {entry.name} needs '{name}', which is defined nowhere")
                needed.add(name)
                pending.append(items[name])
        body = "\n".join(item.text for item in items.values() if item.name in needed)
        modules[entry.name] = "\n".join([*header, body]) + "\n"
    return modules
