"""JSON of recorded results, in lines that can be read and compared."""

import json
from typing import Any

_WIDTH = 110


def dumps(value: Any, indent: int = 0) -> str:
    """Return JSON in which lists of numbers, and everything that fits, take one line."""
    line = json.dumps(value)
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {dumps(item, indent + 1)}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        entries = [dumps(item, indent + 1) for item in value]
    else:
        return line
    if indent + len(line) <= _WIDTH:
        return line
    outer, inner = "\n" + " " * indent, ",\n" + " " * (indent + 1)
    return line[0] + inner[1:] + inner.join(entries) + outer + line[-1]
