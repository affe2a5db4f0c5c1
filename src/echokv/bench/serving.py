"""A load client for OpenAI-compatible servers: sends completions at a rate, times every chunk.

Knows the HTTP API only, so that it measures any server of the kind the same way.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from echokv.bench.metrics import RequestTiming
from echokv.bench.workload import BenchRequest
from echokv.errors import ConfigError, EchoKVError

Clock = Callable[[], float]


class LoadError(EchoKVError):
    """The server can't be measured: unreachable, or it refuses what the benchmark needs."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests are sent.

    Attributes:
        request_rate: requests a second, a Poisson process; inf sends all at once.
        use_arrivals: send at the workload's own arrival times instead.
        max_concurrency: most requests in flight; None is no limit. Waiting for a place isn't part
            of a request's latency (as in vLLM).
        seed: of the Poisson process.
        ignore_eos: ask for exactly the output length (vLLM's extension of the API).
        temperature: of every request.
    """

    request_rate: float = math.inf
    use_arrivals: bool = False
    max_concurrency: int | None = None
    seed: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be positive, got {self.request_rate}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")

    def send_times(self, requests: Sequence[BenchRequest]) -> list[float]:
        """Seconds after the start at which each request is sent; a Poisson process starts at 0.

        Raises:
            ConfigError: arrival times are wanted and the workload has none.
        """
        if self.use_arrivals:
            if any(request.arrival_s is None for request in requests):
                raise ConfigError("--request-rate trace needs a workload with arrival times")
            return [request.arrival_s or 0.0 for request in requests]
        if math.isinf(self.request_rate):
            return [0.0] * len(requests)
        gaps = np.random.default_rng(self.seed).exponential(1 / self.request_rate, len(requests))
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]


def connect(base_url: str, *, api_key: str | None, timeout_s: float) -> httpx2.AsyncClient:
    """A client for one server.

    Args:
        base_url: such as `http://127.0.0.1:8000`.
        api_key: sent as a bearer token; None sends none.
        timeout_s: longest wait for a connection or for the next bytes of an answer.
    """
    return httpx2.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx2.Timeout(timeout_s),
        limits=httpx2.Limits(max_connections=None),
    )


async def served_model(client: httpx2.AsyncClient) -> str:
    """The first model that the server lists.

    Raises:
        LoadError: no server there, or not one of this kind.
    """
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise LoadError(f"no model list from {client.base_url}/v1/models: {error!r}") from error


async def run_load(
    client: httpx2.AsyncClient,
    model: str,
    requests: Sequence[BenchRequest],
    load: Load,
    *,
    on_done: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
) -> tuple[list[RequestTiming], float]:
    """Send a workload and time it.

    Args:
        client: from `connect`.
        model: the name to ask for.
        requests: the workload.
        load: how it is sent.
        on_done: called after each request, for a progress bar.
        clock: seconds; injectable for tests.

    Returns:
        One timing a request, in the workload's order, failed ones included; and the seconds from
        the first send to the last answer.
    """
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    start = clock()

    async def one(request: BenchRequest, send_at: float) -> RequestTiming:
        await asyncio.sleep(max(0.0, start + send_at - clock()))
        async with places or contextlib.nullcontext():
            timing = await send(client, model, request, load, clock=clock)
        on_done()
        return timing

    jobs = [one(*pair) for pair in zip(requests, load.send_times(requests), strict=True)]
    timings = await asyncio.gather(*jobs)
    return timings, clock() - start


async def send(
    client: httpx2.AsyncClient,
    model: str,
    request: BenchRequest,
    load: Load,
    *,
    clock: Clock = time.perf_counter,
) -> RequestTiming:
    """Stream one completion; an error of the server's or of the network's is in the timing."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "max_tokens": request.output_len,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    start = clock()
    chunks: list[float] = []
    usage: dict[str, int] | None = None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx2.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                return RequestTiming(start_s=start, error=f"HTTP {response.status_code}: {text}")
            async for line in response.aiter_lines():
                event = _event(line)
                if event.get("choices"):
                    chunks.append(clock() - start)
                usage = event.get("usage") or usage
                if "error" in event:
                    return RequestTiming(start_s=start, error=f"in the stream: {event['error']}")
    except (httpx2.HTTPError, ValueError) as error:
        return RequestTiming(start_s=start, error=repr(error))
    if not chunks or usage is None:
        return RequestTiming(
            start_s=start, error=f"{len(chunks)} chunks and usage {usage}: both are needed"
        )
    return RequestTiming(
        start_s=start,
        latency_s=chunks[-1],
        chunk_s=tuple(chunks),
        prompt_len=usage["prompt_tokens"],
        output_len=usage["completion_tokens"],
    )


def _event(line: str) -> dict[str, Any]:
    """The JSON of one server-sent event line; empty for keep-alives and the end mark."""
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    event: dict[str, Any] = json.loads(data) if data and data != "[DONE]" else {}
    return event
