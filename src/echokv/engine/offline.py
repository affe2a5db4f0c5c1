"""Drives a synchronous engine over a list of requests; knows nothing of what they are for."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from echokv.config import EngineConfig
from echokv.engine.outputs import RequestOutput
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats


class OfflineEngine(Protocol):
    """What `drive` and the offline benchmark need of `engine.engine.Engine`."""

    config: EngineConfig

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request."""

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it added."""

    def stats(self) -> EngineStats:
        """A snapshot between two steps."""


def drive(
    engine: OfflineEngine,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    name: str = "offline",
) -> Iterator[tuple[int, RequestOutput]]:
    """Run requests to their end, keeping the engine's queue within its limit.

    Args:
        engine: an engine that nobody else is stepping.
        requests: prompt token ids and sampling parameters of each.
        name: prefix of the request ids; give each of two runs on one engine its own.

    Yields:
        (index into `requests`, output) as the engine produces them.

    Raises:
        RequestError: the engine refuses a request; those already running are left in it.
    """
    added = in_flight = 0
    while in_flight or added < len(requests):
        while added < len(requests) and in_flight < engine.config.max_waiting_requests:
            engine.add_request(f"{name}-{added}", *requests[added])
            added += 1
            in_flight += 1
        for output in engine.step():
            in_flight -= output.finished
            yield int(output.request_id.rpartition("-")[2]), output
