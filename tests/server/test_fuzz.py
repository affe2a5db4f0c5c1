"""Generated requests against the OpenAPI schema: no 5xx, nothing undocumented."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.conftest import served
from tests.server.fake_engine import FakeEngine

from echokv.engine.tokenizer import Tokenizer
from echokv.server.app import create_app

JSON = {"Content-Type": "application/json"}

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def _schema() -> schemathesis.BaseSchema:
    # not a fixture: schemathesis 4.32's lazy schemas don't know pytest 9.2's node ids
    with tempfile.TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory))
        tokenizer = Tokenizer.from_dir(directory)
    engine = FakeEngine(tokenizer, max_model_len=64, failing_token=-1)
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(engine))


schema = _schema()


@schema.parametrize()
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_generated_requests(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


# What the schema alone rarely leads to: requests that are mostly right.
small = st.integers(-2, 20)
numbers = st.one_of(
    small, st.floats(-3, 3), st.floats(), st.integers(), st.sampled_from([2**31, 2**63, 2**70])
)
words = st.text(st.characters(codec="utf-8"), max_size=8)
anything = st.one_of(
    st.none(), st.booleans(), numbers, words, st.lists(st.none() | small, max_size=3), st.just({})
)
SAMPLING = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": small,
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 100),
    "max_tokens": small,
    "min_tokens": small,
    "logprobs": small | st.booleans(),
    "top_logprobs": small,
    "stop": words | st.lists(words, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 261), max_size=3),
    "ignore_eos": st.booleans(),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "n": st.just(1),
}
prompts = st.one_of(
    words,
    st.lists(words, max_size=3),
    st.lists(st.integers(0, 261), max_size=5),
    st.lists(st.lists(st.integers(-1, 262), max_size=5), max_size=3),
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]) | words,
            "content": words
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words})),
        }
    ),
    max_size=3,
)
bodies = st.fixed_dictionaries(
    {"prompt": prompts, "messages": messages},
    optional={name: st.one_of(good, good, good, anything) for name, good in SAMPLING.items()},
)


def check_answer(answer: httpx2.Response) -> None:
    """2xx with whole events or JSON, or an error object that says something."""
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        data = [block.removeprefix("data: ") for block in answer.text[:-2].split("\n\n")]
        assert data[-1] == "[DONE]"
        assert all("error" not in json.loads(item) for item in data[:-1])
    else:
        assert answer.json()["choices"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(body=bodies, path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
def test_requests_that_are_mostly_right(quiet: httpx2.Client, body: Any, path: str) -> None:
    check_answer(quiet.post(path, content=json.dumps(body), headers=JSON))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), path=st.sampled_from(["/v1/completions", "/tokenize", "/detokenize"]))
def test_requests_with_damaged_bytes(quiet: httpx2.Client, data: Any, path: str) -> None:
    body = bytearray(json.dumps({"prompt": "aé", "tokens": [1], "max_tokens": 2}).encode())
    for place in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=4)):
        body[place] = data.draw(st.integers(0, 255))
    answer = quiet.post(path, content=bytes(body), headers=JSON)
    assert answer.status_code in (200, 400)


@pytest.fixture(scope="module")
def quiet(tokenizer: Tokenizer) -> Iterator[httpx2.Client]:
    """A server whose engine never fails: its failing token is outside the vocabulary."""
    engine = FakeEngine(tokenizer, max_model_len=64, failing_token=-1)
    with served(create_app(engine)) as url, httpx2.Client(base_url=url, timeout=10) as client:
        yield client
    assert not engine.running
