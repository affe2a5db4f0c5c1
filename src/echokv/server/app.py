"""The HTTP application: routes, API key, documentation. The engine may still be loading."""

import hmac
import time
from importlib.metadata import version as version_of
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST

from echokv.server import chat, completions, responses, tokenization
from echokv.server.body import document_bodies, documented_body, documented_errors, json_body
from echokv.server.errors import ApiError, api_errors, install_error_handlers
from echokv.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from echokv.server.serving_engine import ServingEngine
from echokv.server.state import ServerState

DEFAULT_MAX_BODY_BYTES = 32 * 2**20
"""A million tokens as a JSON list take about 8 MB."""

_GENERATION_ERRORS = (400, 401, 404, 413, 415, 429, 503)
_TOKENIZER_ERRORS = (400, 401, 404, 413, 415, 503)


def create_app(
    engine: ServingEngine,
    *,
    api_key: str | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> FastAPI:
    """The application; `app.state.server` is its `ServerState`.

    Args:
        engine: started by the caller; until it is ready, /health answers 503.
        api_key: what clients must send as a bearer token; None lets everyone in. /health,
            /version and /metrics are always open (vLLM).
        max_body_bytes: larger request bodies are refused with 413.
    """
    state = ServerState(engine=engine, max_body_bytes=max_body_bytes)
    app = FastAPI(title="echokv", version=version_of("echokv"))
    app.state.server = state
    install_error_handlers(app)
    app.include_router(_open_routes(state))
    guards = [] if api_key is None else [Depends(HTTPBearer(auto_error=False)), _guard(api_key)]
    for router in (_model_routes(state), _generation_routes(state), _tokenizer_routes(state)):
        app.include_router(router, dependencies=guards)
    document_bodies(app)
    return app


def _guard(api_key: str) -> Any:
    """A dependency that asks for the API key; runs before the body is read."""
    expected = api_key.encode()

    def check(request: Request) -> None:
        header = request.headers.get("authorization", "").encode("latin-1")
        scheme, _, token = header.partition(b" ")
        # compare_digest takes the same time wherever the first difference is
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), expected):
            raise ApiError(
                401,
                "missing or wrong API key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    return Depends(check)


def _open_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/health",
        response_model=responses.HealthResponse,
        responses={503: {"model": responses.HealthResponse}},
    )
    async def health(response: Response) -> responses.HealthResponse:
        """200 when requests are accepted; else 503 with what start-up is doing."""
        if state.accepts_requests:
            return responses.HealthResponse(status="ready", phase=state.phase)
        response.status_code = 503
        return responses.HealthResponse(status="unavailable", phase=state.phase)

    @router.get("/version", response_model=responses.VersionResponse)
    async def version() -> responses.VersionResponse:
        """The version of echokv."""
        return responses.VersionResponse(version=version_of("echokv"))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics; without the engine's while it doesn't run."""
        running = state.engine.is_ready or state.engine.phase == "draining"
        stats = await state.engine.stats() if running else None
        body = state.metrics.render(stats, state.engine.model_name if running else "")
        return Response(body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _model_routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    started = int(time.time())

    def served() -> responses.Model:
        engine = state.engine_for(None)
        return responses.Model(
            id=engine.model_name, created=started, max_model_len=engine.max_model_len
        )

    @router.get(
        "/v1/models",
        response_model=responses.ModelList,
        responses=documented_errors(401, 503),
    )
    async def list_models() -> responses.ModelList:
        """The one model that is served."""
        return responses.ModelList(data=[served()])

    @router.get(
        "/v1/models/{model:path}",
        response_model=responses.Model,
        responses=documented_errors(401, 404, 503),
    )
    async def get_model(model: str) -> responses.Model:
        """The served model, if that is its name."""
        state.engine_for(model)
        return served()

    return router


def _generation_routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    read_completion = json_body(CompletionRequest, state.max_body_bytes)
    read_chat = json_body(ChatCompletionRequest, state.max_body_bytes)

    @router.post(
        "/v1/completions",
        responses={
            200: _json_or_events(responses.CompletionResponse),
            **documented_errors(*_GENERATION_ERRORS),
        },
        openapi_extra=documented_body(CompletionRequest),
    )
    async def create_completion(
        http: Request, request: Annotated[CompletionRequest, Depends(read_completion)]
    ) -> Response:
        """Continue one or several prompts."""
        with api_errors():
            return await completions.create_completion(state, request, http)

    @router.post(
        "/v1/chat/completions",
        responses={
            200: _json_or_events(responses.ChatCompletionResponse),
            **documented_errors(*_GENERATION_ERRORS),
        },
        openapi_extra=documented_body(ChatCompletionRequest),
    )
    async def create_chat_completion(
        http: Request, request: Annotated[ChatCompletionRequest, Depends(read_chat)]
    ) -> Response:
        """Answer a conversation."""
        with api_errors():
            return await chat.create_chat_completion(state, request, http)

    return router


def _tokenizer_routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    read_text = json_body(TokenizeRequest, state.max_body_bytes)
    read_tokens = json_body(DetokenizeRequest, state.max_body_bytes)

    @router.post(
        "/tokenize",
        response_model=responses.TokenizeResponse,
        responses=documented_errors(*_TOKENIZER_ERRORS),
        openapi_extra=documented_body(TokenizeRequest),
    )
    async def tokenize(
        request: Annotated[TokenizeRequest, Depends(read_text)],
    ) -> responses.TokenizeResponse:
        """Token ids of a prompt or of a conversation."""
        return await tokenization.tokenize(state, request)

    @router.post(
        "/detokenize",
        response_model=responses.DetokenizeResponse,
        responses=documented_errors(*_TOKENIZER_ERRORS),
        openapi_extra=documented_body(DetokenizeRequest),
    )
    async def detokenize(
        request: Annotated[DetokenizeRequest, Depends(read_tokens)],
    ) -> responses.DetokenizeResponse:
        """Text of token ids."""
        return await tokenization.detokenize(state, request)

    return router


def _json_or_events(model: type[Any]) -> dict[str, Any]:
    """Documents a 200 that is JSON, or a stream of events when `stream` is true."""
    return {
        "model": model,
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
