"""What the server needs of an engine; `engine.async_engine.AsyncEngine` is one.

Nothing in `server` names a concrete engine.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from echokv.engine.outputs import RequestOutput
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats
from echokv.engine.tokenizer import Tokenizer


class ServingEngine(Protocol):
    """An engine that many asyncio tasks may use at once."""

    @property
    def phase(self) -> str:
        """What start-up is doing, then "ready", "draining", "stopped" or "failed"."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; an EchoKVError before it is loaded."""

    @property
    def model_name(self) -> str:
        """The name that clients ask for; an EchoKVError before it is loaded."""

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and output together, of one request."""

    async def start(self) -> None:
        """Load everything; returns when requests are accepted. Raises EchoKVError."""

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request; the last one is finished.

        Cancelling the task that awaits the iterator aborts the request.

        Raises:
            RequestError: before the first output; code `queue_full` when too many wait.
            EchoKVError: any other kind means that the engine failed or was stopped.
        """

    async def stats(self) -> EngineStats:
        """A snapshot between two steps."""

    async def drain(self, timeout_s: float) -> bool:
        """Accept nothing new, wait for what runs; False when the time was too short."""

    def stop(self) -> None:
        """End the engine; requests still running end with an EchoKVError. Blocks."""
