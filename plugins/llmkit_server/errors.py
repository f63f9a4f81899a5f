"""Errors as clients get them: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from llmkit.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    LlmkitError,
    RequestTimeoutError,
)

logger = logging.getLogger("llmkit.server")

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    414: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}

RETRY_SOON = {"retry-after": "1"}


class ErrorDetail(msgspec.Struct):
    """What went wrong. param: the field of the request that is to blame. code: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every response that is no success, and of an error in the middle of a stream."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with an HTTP status. headers: more of them for the response."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> ErrorBody:
        kind = TYPES.get(self.status) or ("BadRequestError" if self.status < 500 else "InternalServerError")
        return ErrorBody(ErrorDetail(_sendable(self.message), kind, self.param, self.status))

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body()), self.status, self.headers, "application/json")


class ClientGone(Exception):
    """Nobody is there to be answered any more."""


CLIENT_GONE_STATUS = 499
"""What the log shows for such a request; the client does not see it."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unsupported(message: str, param: str) -> ApiError:
    return ApiError(501, message, param=param)


def as_api_error(error: BaseException) -> ApiError:
    """How a client is told of `error`. What is no deliberate error is logged with its traceback and not shown."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error), param=error.param)
        case EngineDrainingError() | EngineClosedError():  # nobody else closes a server's engine
            return ApiError(503, "The server is shutting down.", headers=RETRY_SOON)
        case EngineDeadError() | EngineOverloadedError():
            return ApiError(503, str(error), headers=RETRY_SOON)
        case RequestTimeoutError():
            return ApiError(504, str(error))
        case EngineError():
            return ApiError(500, str(error))
        case RecursionError():
            return ApiError(400, "The request is nested too deeply.")
        case LlmkitError():
            logger.error("%s", error)
            return ApiError(500, str(error))
    logger.error("A request failed unexpectedly", exc_info=error)
    return ApiError(500, "The server failed unexpectedly; its log says why.")


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of a route the one form. What no handler here takes ends in the outermost middleware."""

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {404: "There is no such endpoint.", 405: "The endpoint does not know this method."}.get(
            error.status_code, str(error.detail)
        )
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_problem(error.errors()).response()

    async def own_error(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def client_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE_STATUS)

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(ApiError, own_error)
    app.add_exception_handler(LlmkitError, own_error)


def validation_problem(problems: Any) -> ApiError:
    """The 400 for what pydantic has found: the first problem, its field as param."""
    first = problems[0]
    path = [part for part in first["loc"] if part not in ("body", "query", "path")]
    param = str(path[0]) if path else None
    where = ".".join(str(part) for part in path) or "the body"
    message = str(first["msg"]).removeprefix("Value error, ")
    return bad_request(f"{where[:200]}: {message[:1].lower()}{message[1:]}.", param)


def _sendable(text: str) -> str:
    """`text` without what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()
