"""Errors, as OpenAI's interface states them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metal_prefill.errors import (
    ChatTemplateError,
    ClosedError,
    ConstraintError,
    ContextOverflowError,
    KVMemoryError,
    MissingExtraError,
)

log = logging.getLogger("metal_prefill.serve")

# Asks clients made by OpenAI's generator not to repeat a request that would fail again.
NO_RETRY = {"x-should-retry": "false"}


class ApiError(Exception):
    """An answer that is an error.

    Parameters
    ----------
    status
        Of HTTP.
    message
        Names the thing, its value and the limit.
    code
        A word for programs.
    param
        Field of the request that it is about.
    headers
        Of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message.encode("utf-8", "backslashreplace").decode())  # JSON is UTF-8
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's name for errors of this status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """Return it as clients expect it."""
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code},
        }

    def response(self) -> Response:
        """Return the answer."""
        return JSONResponse(self.body(), self.status, self.headers)


def api_error(error: Exception) -> ApiError:
    """Return the answer to whatever went wrong with a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of the router: an unknown path or method
        return ApiError(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, ContextOverflowError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, KVMemoryError):
        # A text whose pages are missing waits for those of others: this one has none to wait for.
        return ApiError(400, str(error), code="kv_memory_exceeded")
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), code="invalid_messages")
    if isinstance(error, ConstraintError):
        return ApiError(400, str(error), code="invalid_constraint")
    if isinstance(error, MissingExtraError):
        return ApiError(400, f"this server cannot do that: {error}", code="unsupported")
    if isinstance(error, ClosedError):
        return ApiError(503, "the server is closing", code="closing")
    if isinstance(error, (ValueError, TypeError)):
        return ApiError(400, str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error", headers=NO_RETRY)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer what the router raises."""
    answer = api_error(error)
    path = request.url.path
    if answer.status == 404 and isinstance(error, HTTPException):
        answer = ApiError(404, f"there is no path {path}", code="unknown_path")
    elif answer.status == 405:
        takes = answer.headers.get("Allow", "another method")
        answer = ApiError(405, f"{path} takes {takes}, not {request.method}", headers=answer.headers)
    return answer.response()
