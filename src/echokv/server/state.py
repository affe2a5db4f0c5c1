"""What the handlers share: the engine, the metrics, whether requests are accepted."""

from dataclasses import dataclass, field

from fastapi import Response
from pydantic import BaseModel

from echokv.server.errors import ApiError
from echokv.server.metrics import ServerMetrics
from echokv.server.serving_engine import ServingEngine


@dataclass
class ServerState:
    """One server's state.

    Attributes:
        engine: may still be loading.
        max_body_bytes: larger request bodies are refused.
        metrics: what this server observed.
        is_draining: set when the process was told to end; nothing new is accepted.
    """

    engine: ServingEngine
    max_body_bytes: int
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    is_draining: bool = False

    @property
    def accepts_requests(self) -> bool:
        """Whether generation requests are accepted."""
        return self.engine.is_ready and not self.is_draining

    @property
    def phase(self) -> str:
        """The engine's phase, or "draining"."""
        return "draining" if self.is_draining else self.engine.phase

    def engine_for(self, model: str | None) -> ServingEngine:
        """The engine, if it accepts requests for that model; None stands for the served one.

        Raises:
            ApiError: 503 while loading or draining, 404 for another model.
        """
        if not self.accepts_requests:
            raise ApiError(503, f"the server accepts no requests: {self.phase}", code="unavailable")
        if model is not None and model != self.engine.model_name:
            raise ApiError(
                404,
                f"model {model!r} is not served here; {self.engine.model_name!r} is",
                param="model",
                code="model_not_found",
            )
        return self.engine


def json_response(body: BaseModel) -> Response:
    """A 200 with every field of the body."""
    return Response(body.model_dump_json(), media_type="application/json")
