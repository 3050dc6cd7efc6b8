"""Exceptions of the package.

Each names the thing that is wrong and the limit it breaks. A call that raises leaves the model, the session's
position and its cache as they were, unless its documentation says otherwise.
"""


class MetalPrefillError(Exception):
    """Base class: catches every error that is the package's own."""


class GGUFError(MetalPrefillError, ValueError):
    """The file is not a valid GGUF model: damaged, truncated, contradictory or lacking something required."""


class UnsupportedModelError(MetalPrefillError):
    """The file is valid, but asks for an architecture, tensor type or feature that is not implemented."""


class ContextOverflowError(MetalPrefillError, ValueError):
    """The tokens do not fit into the context after the current position. Nothing was computed or changed."""


class StateError(MetalPrefillError, ValueError):
    """The file is not a saved session, is damaged, or belongs to another model or cache dtype."""


class ChatTemplateError(MetalPrefillError, ValueError):
    """The model's chat template is not valid, or refuses the messages."""


class ConstraintError(MetalPrefillError, ValueError):
    """A constraint on a text cannot be read, nothing satisfies it, or the context ended before it was met."""


class OutputError(MetalPrefillError, OSError):
    """A file cannot be written there: the path names a device, a FIFO, a socket or an open file."""


class HubError(MetalPrefillError, RuntimeError):
    """The model is available neither from the Hugging Face Hub nor from its cache."""


class MissingExtraError(MetalPrefillError, ImportError):
    """A part of the package lacks its optional dependencies; the message says what to install."""


class SessionBusyError(MetalPrefillError, RuntimeError):
    """Two calls would use one session at a time.

    A call would change a session from inside its own progress callback, or a generator finds that another
    call changed its session.
    """


class ForkError(MetalPrefillError, RuntimeError):
    """The process was forked while another thread computed, or from one that uses a GPU.

    Open the model again in the forked process, or fork while no other thread computes.
    """


class DeviceError(MetalPrefillError, RuntimeError):
    """The device is missing, refused an allocation or failed a command."""


class NumericalError(MetalPrefillError, ArithmeticError):
    """The model's results are not numbers, as damaged weights make them: nothing of them is returned."""


class KVMemoryError(MetalPrefillError, MemoryError):
    """The sessions of a model together need more K and V than ``kv_memory`` allows. Nothing was changed."""


class ClosedError(MetalPrefillError, RuntimeError):
    """The model, session or file was used after ``close()``."""
