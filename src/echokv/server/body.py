"""Reading a JSON request body: bounded, and parsed by pydantic straight from the bytes.

FastAPI would parse with `json`, which takes lone surrogates, NaN and 1e400.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from echokv.server import schema
from echokv.server.errors import ApiError, ErrorResponse, validation_error

M = TypeVar("M", bound=BaseModel)

_REF = "#/components/schemas/{model}"

_BODIES = (
    schema.CompletionRequest,
    schema.ChatCompletionRequest,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
)


def json_body(model: type[M], max_bytes: int) -> Callable[[Request], Awaitable[M]]:
    """A FastAPI dependency that reads and validates the body.

    Args:
        model: what the body must be.
        max_bytes: larger bodies are refused without being read to their end.
    """

    async def read(request: Request) -> M:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type must be application/json, got {kind!r}")
        data = await _read(request, max_bytes)
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            raise validation_error(error) from error

    return read


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the request body exceeds the limit of {max_bytes} bytes", code="body_too_large"
    )


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body `json_body` reads."""
    reference = {"$ref": _REF.format(model=model.__name__)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def document_bodies(app: FastAPI) -> None:
    """Add the request bodies to the app's OpenAPI components."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, bodies = models_json_schema(
                [(model, "validation") for model in _BODIES], ref_template=_REF
            )
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(bodies["$defs"])
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def documented_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that can answer with these statuses."""
    return {status: {"model": ErrorResponse} for status in statuses}
