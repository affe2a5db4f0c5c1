"""The load client against a small server in this process."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from tests.bench.fake_server import FIRST_CHUNK_S, NEXT_CHUNK_S, FakeServer, serving

from echokv.bench.metrics import RequestTiming
from echokv.bench.serving import Load, LoadError, connect, run_load, served_model
from echokv.bench.workload import BenchRequest
from echokv.errors import ConfigError


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    with serving(fake) as base_url:
        yield base_url


def measure(
    url: str, requests: Sequence[BenchRequest], load: Load, *, api_key: str | None = None
) -> tuple[list[RequestTiming], float]:
    async def run() -> tuple[list[RequestTiming], float]:
        async with connect(url, api_key=api_key, timeout_s=10) as client:
            return await run_load(client, "fake", requests, load)

    return asyncio.run(run())


def prompts(count: int, output_len: int = 3) -> list[BenchRequest]:
    return [BenchRequest(prompt=(1,) * (n + 1), output_len=output_len) for n in range(count)]


def test_every_chunk_is_timed_and_tokens_are_the_servers_count(fake: FakeServer, url: str) -> None:
    timings, duration = measure(url, prompts(4), Load())
    assert [timing.error for timing in timings] == [None] * 4
    assert [timing.prompt_len for timing in timings] == [1, 2, 3, 4]
    for timing in timings:
        assert timing.output_len == len(timing.chunk_s) == 3
        assert timing.ttft_s >= FIRST_CHUNK_S
        assert timing.latency_s == timing.chunk_s[-1] >= FIRST_CHUNK_S + 2 * NEXT_CHUNK_S * 0.9
        assert timing.latency_s <= duration
    body = fake.bodies[0]
    assert body["model"] == "fake"
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_concurrency_stays_within_its_limit(fake: FakeServer, url: str) -> None:
    timings, _ = measure(url, prompts(9, output_len=4), Load(max_concurrency=3))
    assert all(timing.error is None for timing in timings)
    assert fake.most_in_flight == 3


def test_failures_are_recorded_and_harm_no_other_request(fake: FakeServer, url: str) -> None:
    bad = [BenchRequest(prompt=(token,), output_len=3) for token in (13, 14, 15)]
    timings, _ = measure(url, [*prompts(1), *bad], Load())
    errors = [timing.error for timing in timings]
    assert errors[0] is None
    assert errors[1] is not None
    assert errors[1].startswith("HTTP 400: ")
    assert "no thirteens" in errors[1]
    assert errors[2] is not None
    assert "engine failed" in errors[2]
    assert errors[3] is not None
    assert "usage None" in errors[3]


def test_the_api_key_is_sent(fake: FakeServer, url: str) -> None:
    fake.api_key = "secret"
    (refused,), _ = measure(url, prompts(1), Load())
    (accepted,), _ = measure(url, prompts(1), Load(), api_key="secret")
    assert refused.error is not None
    assert "401" in refused.error
    assert accepted.error is None


def test_requests_are_sent_at_their_arrival_times(fake: FakeServer, url: str) -> None:
    requests = [
        BenchRequest(prompt=(2,), output_len=1, arrival_s=0.3),
        BenchRequest(prompt=(3,), output_len=1, arrival_s=0.0),
    ]
    timings, duration = measure(url, requests, Load(use_arrivals=True))
    assert [body["prompt"] for body in fake.bodies] == [[3], [2]]
    assert timings[0].start_s - timings[1].start_s == pytest.approx(0.3, abs=0.15)
    assert duration >= 0.3


def test_an_unreachable_server_is_one_clear_error() -> None:
    async def run() -> str:
        async with connect("http://127.0.0.1:9", api_key=None, timeout_s=2) as client:
            return await served_model(client)

    with pytest.raises(LoadError, match=r"127\.0\.0\.1:9"):
        asyncio.run(run())


def test_a_network_failure_is_in_the_timing() -> None:
    timings, _ = measure("http://127.0.0.1:9", prompts(2), Load())
    assert all(timing.error is not None for timing in timings)


def test_the_first_model_is_found(url: str) -> None:
    async def run() -> str:
        async with connect(url, api_key=None, timeout_s=10) as client:
            return await served_model(client)

    assert asyncio.run(run()) == "fake"


def test_send_times() -> None:
    requests = prompts(2000)
    assert Load().send_times(requests) == [0.0] * 2000
    times = Load(request_rate=4.0, seed=1).send_times(requests)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.1)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert math.sqrt(variance) == pytest.approx(mean, rel=0.1)  # as an exponential's
    assert times == Load(request_rate=4.0, seed=1).send_times(requests)


@pytest.mark.parametrize(
    "wrong", [{"request_rate": 0.0}, {"request_rate": math.nan}, {"max_concurrency": 0}]
)
def test_loads_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Load(**wrong)  # type: ignore[arg-type]


def test_arrival_times_must_be_known() -> None:
    with pytest.raises(ConfigError, match="arrival times"):
        Load(use_arrivals=True).send_times(prompts(1))
