"""Protection of a server from pages of other sites, which a browser on the same machine shows.

A page can send requests to any address. Its ``Origin`` identifies it, unless the name of its site resolves
to this server (DNS rebinding): then ``Host`` is that name.
"""

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from metal_prefill.serve._errors import ApiError


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
