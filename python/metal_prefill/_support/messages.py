"""Messages: their maximum length, and names of arguments on the command line and in the server."""

import re
from collections.abc import Mapping
from pathlib import Path

from metal_prefill.errors import GGUFError, UnsupportedModelError

# Commands for the methods that messages recommend.
_COMMANDS = {
    "embed": "`metal-prefill embed`",
    "embed_sparse": "Model.embed_sparse in Python",  # no command computes these vectors
    "rerank": "`metal-prefill rerank`",
    "classify": "`metal-prefill label`",
    "label_tokens": "`metal-prefill label`",
    "find_entities": "`metal-prefill label`",
    "run_embeddings": "`metal-prefill bench embed`",
}
# Fields of a request, and options of the server, for arguments.
_FIELDS = {name: f'"{name}"' for name in ("truncate", "how", "label")} | {
    name: f"the server's option --{name.replace('_', '-')}"
    for name in ("max_context", "kv_dtype", "device", "compute", "pooling")
}
# `name`; name=value, but not within a path or quoted text; or the name of an argument that its check rejects.
_NAME = re.compile(
    r"""`(\w+)`|(?<![\w/.'"?&-])(\w+)=('?)([\w.-]+)(?![\w./-])\3|^(\w+)(?= must | is not supported)"""
)


def as_options(message: str, options: Mapping[str, str]) -> str:
    """Replace methods in a message by commands, and arguments by the options of a command."""
    return _renamed(message, _COMMANDS | dict(options))


def as_fields(message: str) -> str:
    """Replace arguments in a message by fields of a request, or by options of the server."""
    return _renamed(message, _FIELDS)


def _renamed(message: str, names: Mapping[str, str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        name, value = names.get(match[1] or match[2] or match[5]), match[4]
        if name is None or value is None:
            return name or match[0]
        return f'{name}: "{value}"' if name.startswith('"') else f"{name} {value}"

    return _NAME.sub(replaced, message)


MOST_CHARACTERS = 1000  # of a message; omits the middle of longer ones, such as a value of megabytes


def shortened(text: str) -> str:
    """Return a text without its middle if it is long."""
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


class Located:
    """Contents of a file, whose errors begin with its path."""

    path: Path

    def error(self, message: str) -> GGUFError:
        """Return, without raising it, an error whose message starts with the path."""
        return GGUFError(shortened(f"{self.path}: {message}"))

    def unsupported(self, message: str) -> UnsupportedModelError:
        return UnsupportedModelError(shortened(f"{self.path}: {message}"))


def counted(count: int, noun: str) -> str:
    """Return the count and the noun, in the plural unless the count is 1."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
