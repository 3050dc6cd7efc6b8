"""Messages: their maximum length, and names of arguments on the command line and in the server."""

import re
from pathlib import Path

from metal_prefill.errors import GGUFError, UnsupportedModelError

_FIELDS = ("truncate", "how", "label")  # of requests; the others are options of the server
_ARGUMENT = re.compile(rf"\b(max_context|kv_dtype|device|compute|pooling|{'|'.join(_FIELDS)})=('?)([\w.]+)\2")


def as_options(message: str) -> str:
    """Write ``max_context=512`` in a message as ``--max-context 512``."""
    return _ARGUMENT.sub(_option, message)


def as_fields(message: str) -> str:
    """Write an argument in a message as a field of a request, or as an option of the server."""
    return _ARGUMENT.sub(
        lambda match: f'"{match[1]}": "{match[3]}"'
        if match[1] in _FIELDS
        else f"the server's option {_option(match)}",
        message,
    )


def _option(match: re.Match[str]) -> str:
    return f"--{match[1].replace('_', '-')} {match[3]}"


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
