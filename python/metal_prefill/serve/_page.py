"""The page at ``/``: static files, served from memory.

The files contain no data. Scripts fetch it from the API, with the key that the user enters.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only files of this server are loaded. With `require-trusted-types-for`, browsers that support it refuse to
# parse a string as HTML, so that a model's text cannot become markup.
_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a newer version of the package has other files at the same paths
}


def page_routes() -> list[Route]:
    """Return a route for each file of the page; ``index.html`` is ``/``."""
    return [_route(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _MEDIA_TYPES]


def _route(path: Path) -> Route:
    body = path.read_bytes()
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {**_HEADERS, "etag": tag, "content-type": _MEDIA_TYPES[path.suffix]}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    return Route("/" if path.name == "index.html" else f"/page/{path.name}", answer)
