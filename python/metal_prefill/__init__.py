"""Fast prompt processing for small quantized language models and text encoders.

>>> from metal_prefill import Model
>>> model = Model()                                    # the small model that is bundled with the package
>>> ids = model.tokenizer.encode("ROMEO:")
>>> first = model.forward_prompt(ids)                  # greedy id of the next token
>>> second = model.forward_token_greedy(first)
"""

from __future__ import annotations

from metal_prefill._support.lazy import lazy_names
from metal_prefill.errors import (
    ChatTemplateError,
    ClosedError,
    ConstraintError,
    ContextOverflowError,
    DeviceError,
    ForkError,
    GGUFError,
    HubError,
    KVMemoryError,
    MetalPrefillError,
    MissingExtraError,
    NumericalError,
    OutputError,
    SessionBusyError,
    StateError,
    UnsupportedModelError,
)

# `typing` and other modules of the standard library take most of the time until the command line can handle
# Ctrl-C, and are therefore not imported here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from metal_prefill.chat import Conversation
    from metal_prefill.generation._scheduler import Scheduler
    from metal_prefill.hub._local_file import default_model_path
    from metal_prefill.model import Model
    from metal_prefill.session import Piece, Session

    __version__: str  # version of the installed distribution

__all__ = [
    "ChatTemplateError", "ClosedError", "ConstraintError", "ContextOverflowError", "Conversation",
    "DeviceError", "ForkError", "GGUFError", "HubError", "KVMemoryError", "MetalPrefillError",
    "MissingExtraError", "Model", "NumericalError", "OutputError", "Piece", "Scheduler", "Session",
    "SessionBusyError", "StateError", "UnsupportedModelError", "default_model_path",
]  # fmt: skip

# Loaded on first use, so that the command line can print its help without importing NumPy.
_find = lazy_names(
    __name__,
    **{
        "chat": "Conversation",
        "generation._scheduler": "Scheduler",
        "hub._local_file": "default_model_path",
        "model": "Model",
        "session": "Piece Session",
    },
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from metal_prefill.storage._cache_folder import version

        return version()
    return _find(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
