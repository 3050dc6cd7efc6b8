"""Errors in OpenAI's format."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metal_prefill._support.messages import as_fields, shortened
from metal_prefill.errors import (
    ClosedError,
    ConstraintError,
    DeviceError,
    KVMemoryError,
    MissingExtraError,
    UnsupportedModelError,
)
from metal_prefill.generation._constraint_process import NoWorkerError

log = logging.getLogger("metal_prefill.serve")

# OpenAI's generated clients do not retry a request whose answer has this header.
NO_RETRY = {"x-should-retry": "false"}
RETRY = {"Retry-After": "1"}
# The unread rest of a body must not be parsed as the next request.
CLOSE = {"connection": "close"}


class ApiError(Exception):
    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # JSON is UTF-8.
        super().__init__(shortened(as_fields(message)).encode("utf-8", "backslashreplace").decode())
        self.status = status
        self.code = code
        self.param = None if param is None else shortened(param)
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's error type for this status."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """Return the JSON body in OpenAI's format."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers)


def unsupported(message: str, param: str | None = None) -> ApiError:
    """Return the error for a request that the model or the server cannot follow."""
    return ApiError(message, param=param, code="unsupported")


def missing(param: str) -> ApiError:
    """Return the error for a request without a field."""
    return ApiError(f"you must provide {param}", param=param, code="missing_required_parameter")


_REFUSALS = {
    # A text that lacks pages waits for other texts to free theirs; this one exceeds the whole pool.
    KVMemoryError: "kv_memory_exceeded",
    ConstraintError: "invalid_constraint",
    UnsupportedModelError: None,  # of a text that the tokenizers library cannot divide
    ValueError: None,
    TypeError: None,
}


def api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # from the router: unknown path or method
        return ApiError(error.detail, status=error.status_code, headers=error.headers)
    if isinstance(error, NoWorkerError):
        return ApiError(str(error), status=503, code="no_constraint_worker", headers=RETRY)
    if isinstance(error, MissingExtraError):
        return unsupported(f"not supported by this server: {error}")
    if isinstance(error, ClosedError):
        return ApiError("the server is closing", status=503, code="closing")
    for kind, code in _REFUSALS.items():
        if isinstance(error, kind):
            return ApiError(str(error), code=code)
    log.error("a request failed", exc_info=error)
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, (DeviceError, MemoryError)):
        return ApiError(message, status=503, code="out_of_resources", headers=RETRY)
    return ApiError(message, status=500, code="internal_error", headers=NO_RETRY)


async def answer_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    path = request.url.path
    if answer.status == 404 and isinstance(error, HTTPException):
        answer = ApiError(f"there is no path {path}", status=404, code="unknown_path")
    elif answer.status == 405:
        takes = answer.headers.get("Allow", "another method")
        answer = ApiError(f"{path} takes {takes}, not {request.method}", status=405, headers=answer.headers)
    return answer.response()
