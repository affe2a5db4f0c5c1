"""The server over the real engine with a small random model: same tokens, and nothing kills it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from openai import OpenAI
from tests.server.conftest import wait_for
from tests.server.test_fuzz import JSON, bodies, check_answer, path_of
from tests.serving import served

from echokv.config import EngineConfig
from echokv.engine.async_engine import AsyncEngine
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams
from echokv.models.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(path, num_hidden_layers=2, hidden_size=128)
    return EngineConfig(
        model=str(path),
        served_model_name="tiny",
        dtype="float32",
        host_pool_gib=0.02,
        device_pool_tokens=256,
        max_model_len=512,
        max_num_seqs=8,
    )


@pytest.fixture(scope="module")
def url(config: EngineConfig) -> Iterator[str]:
    with served(AsyncEngine(config)) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=60) as client:
        yield client


def test_same_tokens_as_offline(url: str, config: EngineConfig) -> None:
    prompts = ["hello", "é" * 40, "x" * 100]
    engine = Engine(config)
    try:
        offline = engine.generate(
            [engine.tokenizer.encode(prompt) for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        )
    finally:
        engine.close()
    texts = ["".join(output.text for output in outputs) for outputs in offline]
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny",
            prompt=prompts,
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60


def test_prefix_cache_shows_in_usage_and_metrics(http: httpx2.Client) -> None:
    body = {"prompt": "once upon a time, " * 20, "max_tokens": 1, "temperature": 0}
    first, second = (http.post("/v1/completions", json=body).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
    text = http.get("/metrics").text
    assert 'echokv:selected_rows_total{layer="1",model_name="tiny"}' in text


def test_leaving_frees_the_slots(http: httpx2.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
    wait_for(
        lambda: 'echokv:host_pool_live_slots{model_name="tiny"} 0.0' in http.get("/metrics").text
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [262]}, "token id 262 is outside the vocabulary of 262"),
        ({"prompt": [2**70]}, "outside the vocabulary"),
        ({"prompt": "x" * 600}, "601 tokens, but max_model_len is 512"),
        ({"prompt": "x", "max_tokens": 511}, "max_tokens 511"),
        ({"prompt": "x", "stop_token_ids": [262]}, "outside the vocabulary"),
    ],
)
def test_refusals(http: httpx2.Client, body: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 100, "presence_penalty": -2, "frequency_penalty": 2},
        {"temperature": 5e-324},
        {"top_p": 5e-324, "min_p": 1, "top_k": 2**31 - 1},
        {"seed": -(2**63), "min_tokens": 3, "logprobs": 20},
    ],
)
def test_extreme_values(http: httpx2.Client, fields: dict[str, Any]) -> None:
    body = {"prompt": "abc", "max_tokens": 4, **fields}
    check_answer(http.post("/v1/completions", json=body))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(body=bodies())
def test_nothing_kills_the_engine(url: str, body: dict[str, Any]) -> None:
    if body.get("max_tokens") is None:
        body = body | {"max_tokens": 3}  # not the whole of max_model_len
    check_answer(
        httpx2.post(url + path_of(body), content=json.dumps(body), headers=JSON, timeout=60)
    )
