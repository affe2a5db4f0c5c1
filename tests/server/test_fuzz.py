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
def test_generated_requests(case: "schemathesis.Case[Any]") -> None:
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
some_words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
token_ids = st.integers(0, 261)
FIELDS = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 20),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 100, exclude_min=True),
    "max_tokens": st.integers(2, 20),
    "min_tokens": st.integers(0, 2),
    "stop": some_words | st.lists(some_words, max_size=3),
    "stop_token_ids": st.lists(token_ids, max_size=3),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "n": st.just(1),
}
prompts = st.one_of(
    some_words,
    st.lists(some_words, min_size=1, max_size=3),
    st.lists(token_ids, min_size=1, max_size=5),
    st.lists(st.lists(token_ids, min_size=1, max_size=5), min_size=1, max_size=3),
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=2)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": words | parts}
    ),
    min_size=1,
    max_size=3,
)
chats = st.fixed_dictionaries({"messages": messages}, optional=FIELDS | {"logprobs": st.booleans()})
completions = st.fixed_dictionaries(
    {"prompt": prompts},
    optional=FIELDS | {"logprobs": st.integers(0, 20), "add_special_tokens": st.booleans()},
)
OTHERS = ["prompt", "messages", "logprobs", "top_logprobs", "echo", "stream_options", "model"]


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A good request of either kind; half of them with one field replaced by whatever."""
    body: dict[str, Any] = draw(st.one_of(chats, completions))
    if draw(st.booleans()):
        body[draw(st.sampled_from([*FIELDS, *OTHERS]))] = draw(anything)
    return body


def path_of(body: dict[str, Any]) -> str:
    """Where a body of `bodies` belongs."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def check_answer(answer: httpx2.Response) -> None:
    """2xx with whole events or JSON, or an error object that says something."""
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        data = [block.removeprefix("data: ") for block in answer.text[:-2].split("\n\n")]
        assert data[-1] == "[DONE]"
        assert all("error" not in json.loads(item) for item in data[:-1])
    else:
        assert answer.json()["choices"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(body=bodies())
def test_requests_that_are_mostly_right(quiet: httpx2.Client, body: dict[str, Any]) -> None:
    check_answer(quiet.post(path_of(body), content=json.dumps(body), headers=JSON))


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
