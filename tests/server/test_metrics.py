"""/metrics, parsed as Prometheus does."""

from collections.abc import Iterator

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.byte_tokenizer import EOS_ID
from tests.server.conftest import served, wait_for
from tests.server.fake_engine import FakeEngine

from echokv.engine.tokenizer import Tokenizer
from echokv.server.app import create_app

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def fresh(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def client(fresh: FakeEngine) -> Iterator[httpx2.Client]:
    with served(create_app(fresh)) as url, httpx2.Client(base_url=url) as client:
        yield client


def scrape(client: httpx2.Client) -> Samples:
    """Samples by name without prefix and labels without the model's name."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake-model"
            key = (sample.name.removeprefix("echokv:"), tuple(sorted(labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return samples


def test_what_the_engine_counts(client: httpx2.Client) -> None:
    samples = scrape(client)
    for name, value in {
        "num_requests_running": 0,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.25,
        "num_preemptions_total": 4,
        "prompt_tokens_total": 0,
        "generation_tokens_total": 0,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 25,
        "host_pool_slots": 6400,
        "host_pool_live_slots": 1600,
        "host_pool_cached_slots": 640,
        "device_pool_slots": 1280,
        "device_pool_live_slots": 99,
    }.items():
        assert samples[name, ()] == value, name
    for name, values in {
        "device_pool_hit_rate": (0.75, 1),
        "selected_rows_total": (200, 0),
        "recalled_rows_total": (50, 0),
        "evicted_rows_total": (7, 0),
        "resident_rows": (40, 0),
    }.items():
        assert [samples[name, (("layer", layer),)] for layer in "01"] == list(values), name
    assert samples["prefetched_rows_total", (("layer", "0"), ("outcome", "useful"))] == 3
    assert samples["prefetched_rows_total", (("layer", "0"), ("outcome", "wasted"))] == 2


def test_what_the_server_observes(client: httpx2.Client, fresh: FakeEngine) -> None:
    before = scrape(client)
    for reason in ("stop", "length", "abort"):
        assert before["request_success_total", (("finished_reason", reason),)] == 0
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert before[f"{name}_count", ()] == 0
    client.post("/v1/completions", json={"prompt": ["ab", "c"], "max_tokens": 5})
    client.post("/v1/completions", json={"prompt": [97, 98, EOS_ID], "stream": True})
    client.post("/v1/completions", json={"prompt": [97, 999]})  # refused
    fresh.token_delay_s = 0.01
    with client.stream("POST", "/v1/completions", json={"prompt": "ab", "stream": True}) as answer:
        next(answer.iter_lines())
    wait_for(lambda: not fresh.running)
    after = scrape(client)
    for reason, count in (("stop", 1), ("length", 2), ("abort", 1)):
        assert after["request_success_total", (("finished_reason", reason),)] == count
    assert after["time_to_first_token_seconds_count", ()] == 4
    assert after["e2e_request_latency_seconds_count", ()] == 3
    assert after["request_prompt_tokens_sum", ()] == 3 + 2 + 3
    assert after["request_generation_tokens_sum", ()] == 5 + 5 + 3
    assert after["request_prompt_tokens_bucket", (("le", "2.0"),)] == 1
    between = after["inter_token_latency_seconds_count", ()]
    assert between == after["generation_tokens_total", ()] - 4
    assert after["prompt_tokens_total", ()] == 3 + 2 + 3 + 3


@pytest.mark.parametrize("phase", ["loading weights", "stopped", "failed"])
def test_without_an_engine(client: httpx2.Client, fresh: FakeEngine, phase: str) -> None:
    fresh.phase = phase
    assert scrape(client) == {}
