"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_prefill.serve._errors import ApiError

OPEN_PATHS = ("/health",)  # for those who ask whether the server is there


class RequireKey:
    """Middleware: lets requests in that bring a key, as ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or hand it on."""
        if scope["type"] == "http" and not scope["path"].endswith(OPEN_PATHS):
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            given = key.strip().encode() if kind.lower() == "bearer" else b""
            # All keys are compared, each in constant time: how long it takes tells nothing of them.
            if sum(hmac.compare_digest(given, known) for known in self._keys) == 0:
                problem = "Incorrect API key provided" if given else "You didn't provide an API key"
                error = ApiError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
