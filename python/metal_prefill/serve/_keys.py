"""API keys and their prefix namespaces."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._settings import Settings

OPEN_PATHS = ("/health",)  # need no key, so that monitoring can probe the server


class RequireKey:
    """Middleware that requires a key for paths that are not open.

    It is in ``Authorization: Bearer KEY`` or, as Anthropic's clients send it, in ``X-Api-Key: KEY``.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._keys = [key.encode("utf-8") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request without a valid key, or pass it to the application."""
        if scope["type"] == "http" and _route(scope) not in self._open_paths:
            given = _given_key(Headers(scope=scope))
            # All keys are compared, each in constant time, so that the time reveals nothing about them.
            if sum(hmac.compare_digest(given, known) for known in self._keys) == 0:
                problem = "Incorrect API key provided" if given else "You didn't provide an API key"
                error = ApiError(
                    problem, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def prefix_key(settings: Settings, headers: Headers) -> bytes:
    """Return the API key that separates the prefixes of a request from others; empty if all share them."""
    return b"" if settings.share_prefixes or not settings.api_keys else _given_key(headers)


def prefix_namespace(key: bytes, cache_key: str | None) -> str:
    """Return the namespace of a request by its :func:`prefix_key` and its ``prompt_cache_key``.

    The namespace is a hash, so that neither value is stored. It is empty, and shared, if both are.
    """
    if not key and not cache_key:
        return ""
    # The digest has a fixed size, so that no two pairs concatenate to the same bytes.
    parts = hashlib.blake2b(key).digest() + (cache_key or "").encode("utf-8", "surrogatepass")
    return hashlib.blake2b(parts, digest_size=32).hexdigest()


def _given_key(headers: Headers) -> bytes:
    given = dict(headers.raw)
    kind, _, key = given.get(b"authorization", b"").partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else given.get(b"x-api-key", b"")


def _route(scope: Scope) -> str:
    """Return the path of a request relative to the mount point of the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
