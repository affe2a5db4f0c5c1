"""Every failure as OpenAI's error object: {"error": {message, type, param, code}}.

Knows how errors of the engine, of validation and of HTTP map to statuses; raises nothing itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from echokv.errors import EchoKVError, RequestError
from echokv.log import get_logger

logger = get_logger(__name__)

MAX_MESSAGE_CHARS = 1000
"""Messages quote values from the request, which may be megabytes long."""

RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is left to read it

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}

_STATUS_OF_CODE = {"queue_full": 429, "model_not_found": 404}

_UNION_RULES = {
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "a string or a list of at most 16 strings",
    "content": 'a string or a list of text parts ({"type": "text", "text": ...})',
}
"""Fields of several types: pydantic reports one error a type, a client needs one rule."""


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every response that isn't 2xx."""

    error: ErrorInfo


class ApiError(Exception):
    """An answer other than 2xx.

    Args:
        status: HTTP status.
        message: what is wrong, with the value and the limit.
        param: the request field at fault, or None.
        code: a short machine-readable reason, or None.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> ErrorResponse:
        """The error object."""
        message = str(self)
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        kind = _TYPES.get(self.status, "invalid_request_error")
        return ErrorResponse(
            error=ErrorInfo(message=message, type=kind, param=self.param, code=self.code)
        )

    def response(self) -> Response:
        """The whole HTTP response."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(
            self.body.model_dump_json(),
            status_code=self.status,
            media_type="application/json",
            headers=headers,
        )


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception; one that nobody foresaw is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        status = _STATUS_OF_CODE.get(error.code or "", 400)
        return ApiError(status, str(error), param=error.param, code=error.code)
    if isinstance(error, EchoKVError):
        return ApiError(503, str(error), code="engine_unavailable")
    logger.error("request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error: the server's log has the cause", code="internal_error")


def validation_error(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a JSON body, as a 400 that names the field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the request body is not valid JSON: {first['msg']}")
    path, rule = "", None
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
        rule = _UNION_RULES.get(str(part))
        if rule is not None:
            break
    if rule is not None and first["type"] != "missing":
        return ApiError(400, f"{path} must be {rule}", param=path)
    message = first["msg"]
    return ApiError(400, f"{path}: {message}" if path else message, param=path or None)


@contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Within it, a RequestError about an engine parameter names the client's field instead."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        raise RequestError(str(error), param=name, code=error.code) from error


@contextmanager
def api_errors() -> Iterator[None]:
    """Within it, every failure is an ApiError.

    Starlette answers other exceptions too, but then drops the connection, and with it the
    client's next request.
    """
    try:
        yield
    except ClientDisconnect:
        raise
    except Exception as error:
        raise as_api_error(error) from error


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception with the error object."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    async def answer_nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ApiError, answer)
    app.add_exception_handler(EchoKVError, answer)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_exception_handler(Exception, answer)
