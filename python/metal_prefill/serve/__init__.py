"""Server of the OpenAI API for many concurrent clients of one model.

Needs the extra ``serve`` (``pip install 'metal_prefill[serve]'``). ``metal-prefill serve`` runs it;
:func:`app` returns the ASGI application, to mount it elsewhere.

>>> from metal_prefill import Model, serve
>>> import uvicorn
>>> uvicorn.run(serve.app(Model("smollm2")), port=8080)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metal_prefill.errors import MissingExtraError
from metal_prefill.serve._settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from metal_prefill.model import Model

__all__ = ["Settings", "app"]


def app(model: Model, settings: Settings | None = None) -> Starlette:
    """Return an ASGI application that serves a model.

    All requests share the passes of one engine loop. The result of a request does not depend on the other
    requests; on the CPU it is bit-identical.

    Parameters
    ----------
    model
        Remains owned by the caller, who closes it after the server has ended.
    settings
        Names, keys and limits; None selects the defaults.

    Raises
    ------
    MissingExtraError
        The extra ``serve`` is not installed.
    """
    try:
        from metal_prefill.serve._app import make_app
    except ImportError as error:
        raise MissingExtraError(f"the server needs: pip install 'metal_prefill[serve]' ({error})") from error
    return make_app(model, settings or Settings())
