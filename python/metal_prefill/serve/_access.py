"""Access to a server: foreign pages are refused, and API keys separate prefixes.

A page of another site, which a browser on the same machine shows, can send requests to any address. Its
``Origin`` identifies it, unless the name of its site resolves to this server (DNS rebinding): then ``Host``
is that name.
"""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_prefill.serve._errors import ApiError
from metal_prefill.serve._settings import Settings

OPEN_PATHS = ("/health",)  # need no key, so that monitoring can probe the server


class RefuseForeign:
    """Middleware that refuses requests with a foreign ``Host`` or ``Origin``."""

    def __init__(
        self,
        app: ASGIApp,  # application
        # Names of the server besides IP addresses, ``localhost`` and the machine's name; ``*`` allows all.
        hosts: Collection[str],
        # Origins of pages that may use the server besides its own; ``*`` allows all.
        origins: Collection[str],
    ) -> None:
        self._app = app
        machine = socket.gethostname().lower()
        self._hosts = {"localhost", machine, f"{machine}.local", *(host.lower() for host in hosts)}
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it to the application."""
        if scope["type"] == "http" and (error := self._problem(Headers(scope=scope))) is not None:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", "localhost"), headers.get("origin")
        if not self._allows(host):
            return ApiError(
                f"{host!r} is not a name of this server; --allowed-host adds names",
                status=403,
                code="foreign_host",
            )
        if origin is None or not self._origins.isdisjoint({"*", origin.lower()}):
            return None
        if origin.lower().partition("://")[2] == host.lower():
            return None
        return ApiError(
            f"pages of {origin!r} may not use this server; --cors-origin allows origins",
            status=403,
            code="foreign_origin",
        )

    def _allows(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            return False
        if name in self._hosts or name.endswith(".localhost") or "*" in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)  # no site has an address as its name
        except ValueError:
            return False
        return True


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
