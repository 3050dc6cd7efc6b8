"""Fast prompt processing for small quantized Llama-family models.

>>> from metal_prefill import Model
>>> model = Model()                                    # the small model that ships with the package
>>> ids = model.tokenizer.encode("ROMEO:")
>>> first = model.forward_prompt(ids)                  # greedy id of the next token
>>> second = model.forward_token_greedy(first)
"""

from metal_prefill.errors import (
    ChatTemplateError,
    ClosedError,
    ContextOverflowError,
    DeviceError,
    GGUFError,
    HubError,
    MetalPrefillError,
    MissingExtraError,
    StateError,
    UnsupportedModelError,
)
from metal_prefill.model import Model, default_model_path
from metal_prefill.session import Session

__version__ = "0.1.0"

__all__ = [
    "ChatTemplateError",
    "ClosedError",
    "ContextOverflowError",
    "DeviceError",
    "GGUFError",
    "HubError",
    "MetalPrefillError",
    "MissingExtraError",
    "Model",
    "Session",
    "StateError",
    "UnsupportedModelError",
    "default_model_path",
]
