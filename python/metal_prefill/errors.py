"""Exceptions of the package.

Messages contain the invalid item, its value and the limit. A call that raises leaves the model and the
session's position and cache unchanged, unless its documentation states otherwise.
"""


class MetalPrefillError(Exception):
    """Base class of all exceptions defined by the package."""


class GGUFError(MetalPrefillError, ValueError):
    """The file is not a valid GGUF model: damaged, truncated, contradictory or lacking something required."""


class UnsupportedModelError(MetalPrefillError):
    """The file is valid, but requires an architecture, tensor type or feature that is not implemented."""


class ContextOverflowError(MetalPrefillError, ValueError):
    """The tokens do not fit into the context after the current position. Nothing was computed or changed."""


class StateError(MetalPrefillError, ValueError):
    """The file is not a saved session, is damaged, or belongs to another model or cache dtype."""


class ChatTemplateError(MetalPrefillError, ValueError):
    """The model's chat template is not valid, or rejects the messages."""


class ConstraintError(MetalPrefillError, ValueError):
    """A constraint is not valid, cannot be satisfied, or was not satisfied before the context ended."""


class OutputError(MetalPrefillError, OSError):
    """A file cannot be written there: the path names a device, a FIFO, a socket or an open file."""


class HubError(MetalPrefillError, RuntimeError):
    """The model is available neither from the Hugging Face Hub nor from its cache."""


class MissingExtraError(MetalPrefillError, ImportError):
    """An optional dependency is not installed; the message names the command that installs it."""


class SessionBusyError(MetalPrefillError, RuntimeError):
    """Two calls use the same session or scheduler at the same time.

    Raised when a call would change a session from inside its own progress callback, when a generator
    detects that another call has changed its session, and when a draft function starts a pass of its
    scheduler.
    """


class ForkError(MetalPrefillError, RuntimeError):
    """The process was forked while another thread was computing, or its parent uses a GPU.

    Open the model again in the forked process, or fork while no other thread is computing.
    """


class DeviceError(MetalPrefillError, RuntimeError):
    """The device is missing, refused an allocation or failed a command."""


class NumericalError(MetalPrefillError, ArithmeticError):
    """The model computed NaN, for example because of damaged weights. No results are returned."""


class KVMemoryError(MetalPrefillError, MemoryError):
    """The KV caches of a model's sessions would exceed ``kv_memory``. Nothing was changed."""


class ClosedError(MetalPrefillError, RuntimeError):
    """The model, session or file was used after ``close()``."""
