"""A server with OpenAI's interface: many clients at a time over one model.

Needs the extra ``serve`` (``pip install 'metal_prefill[serve]'``). ``metal-prefill serve`` runs it;
:func:`app` gives the ASGI application to those who mount it elsewhere.

>>> from metal_prefill import Model, serve
>>> import uvicorn
>>> uvicorn.run(serve.app(Model("smollm2")), port=8080)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metal_prefill.errors import MissingExtraError
from metal_prefill.serve._settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from metal_prefill.model import Model

__all__ = ["Settings", "app"]


def app(model: Model, settings: Settings | None = None, **limits: Any) -> Starlette:
    """Return an ASGI application that serves a model.

    Requests of all kinds share the passes of one engine loop. What a request gets does not depend on the
    others: on the CPU bit for bit.

    Parameters
    ----------
    model
        Stays yours: close it after the server has ended.
    settings
        Limits.
    limits
        The fields of :class:`Settings`, in its place.

    Raises
    ------
    MissingExtraError
        The extra ``serve`` is not installed.
    TypeError, ValueError
        A limit is unknown, or out of range.
    """
    if settings is not None and limits:
        raise TypeError(f"settings have {', '.join(limits)} already: give settings or limits, not both")
    try:
        from metal_prefill.serve._app import make_app
    except ImportError as error:
        raise MissingExtraError(f"the server needs: pip install 'metal_prefill[serve]' ({error})") from error
    return make_app(model, Settings(**limits) if settings is None else settings)
