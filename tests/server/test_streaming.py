"""The bytes of event streams, and what happens when either side gives up."""

import asyncio
import json
import threading
from collections.abc import Iterator

import httpx2
import pytest
from openai import APIError, OpenAI
from tests.server.conftest import served, wait_for
from tests.server.fake_engine import FAILING_TOKEN, FakeEngine

from echokv.engine.tokenizer import Tokenizer
from echokv.server.app import create_app


def events(body: bytes) -> list[str]:
    """The data of every event; checks the framing that the SSE standard asks for."""
    assert body.endswith(b"\n\n")
    blocks = body.decode("utf-8", "strict")[:-2].split("\n\n")
    assert all(block.startswith("data: ") for block in blocks)
    assert all(len(block.splitlines()) == 1 for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def texts(body: bytes) -> list[str]:
    data = events(body)
    assert data[-1] == "[DONE]"
    return [json.loads(item)["choices"][0]["text"] for item in data[:-1]]


def test_framing_and_headers(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers
    assert texts(answer.content) == ["a", "b"]


@pytest.mark.parametrize("text", ["x😀é中\U0010ffff", 'a\r\nb\n\nc\u2028d\x85e\x00f\\"', "�"])
def test_text_that_could_break_framing_or_utf8(http: httpx2.Client, text: str) -> None:
    body = {
        "prompt": text,
        "max_tokens": len(text.encode()),
        "stream": True,
        "add_special_tokens": False,
    }
    pieces = texts(http.post("/v1/completions", json=body).content)
    assert "".join(pieces) == text
    assert len(pieces) == len(text)  # a chunk a character, none for half of one


def test_half_a_character_at_the_end_is_shown(http: httpx2.Client) -> None:
    body = {"prompt": [0x61, 0xF0, 0x9F], "max_tokens": 3, "stream": True}
    assert texts(http.post("/v1/completions", json=body).content) == ["a", "�"]


def test_failure_on_the_way_is_an_error_event(http: httpx2.Client, base_url: str) -> None:
    body = {"prompt": [0x61, 0x62, FAILING_TOKEN], "stream": True}
    data = events(http.post("/v1/completions", json=body).content)
    assert [json.loads(item)["choices"][0]["text"] for item in data[:2]] == ["a", "b"]
    assert json.loads(data[2])["error"]["type"] == "internal_server_error"
    assert data[3:] == ["[DONE]"]
    with (
        OpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(APIError, match="internal error"),
    ):
        list(
            client.completions.create(model="fake-model", prompt=[0x61, FAILING_TOKEN], stream=True)
        )


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_has_a_status(http: httpx2.Client, stream: bool) -> None:
    for _ in range(2):  # the connection survives it
        answer = http.post("/v1/completions", json={"prompt": [FAILING_TOKEN], "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "fake engine" not in answer.text


def test_one_of_several_failing_aborts_the_others(http: httpx2.Client, engine: FakeEngine) -> None:
    aborted = len(engine.aborted)
    body = {"prompt": [[0x61], [0x62], [0x63, 299, 300]], "stream": True, "max_tokens": 400}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "token id 300 is outside the vocabulary of 300" in answer.text
    wait_for(lambda: not engine.running)
    assert len(engine.aborted) == aborted + 2


@pytest.fixture(scope="module")
def slow(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, token_delay_s=0.02, max_model_len=10_000)


@pytest.fixture(scope="module")
def slow_url(slow: FakeEngine) -> Iterator[str]:
    with served(create_app(slow)) as url:
        yield url


def test_tokens_arrive_one_by_one(slow_url: str, slow: FakeEngine) -> None:
    body = {"prompt": "abc", "max_tokens": 500, "stream": True, "add_special_tokens": False}
    with (
        httpx2.Client(base_url=slow_url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()  # kept: a lost iterator closes the connection
        assert '"text":"a"' in next(lines)
        assert len(slow.running) == 1  # the rest is still being computed
    wait_for(lambda: not slow.running)


@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
def test_leaving_a_stream_aborts(slow_url: str, slow: FakeEngine, prompt: str | list[str]) -> None:
    before = len(slow.aborted)
    body = {"prompt": prompt, "max_tokens": 5000, "stream": True}
    with (
        httpx2.Client(base_url=slow_url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        next(answer.iter_lines())
    wait_for(lambda: not slow.running)
    assert len(slow.aborted) - before == (1 if prompt == "abc" else 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_before_the_first_byte_aborts(
    slow_url: str, slow: FakeEngine, path: str, stream: bool
) -> None:
    before = len(slow.aborted)
    body = {
        "prompt": "abc",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5000,
        "stream": stream,
    }
    slow.token_delay_s = 0.5
    try:
        with (
            httpx2.Client(base_url=slow_url, timeout=0.25) as client,
            pytest.raises(httpx2.ReadTimeout),
        ):
            client.post(path, json=body)
        wait_for(lambda: len(slow.aborted) == before + 1)
        assert not slow.running
    finally:
        slow.token_delay_s = 0.02


def test_cancelling_in_the_async_client_aborts(slow_url: str, slow: FakeEngine) -> None:
    from openai import AsyncOpenAI

    before = len(slow.aborted)

    async def start_and_cancel() -> None:
        async with AsyncOpenAI(base_url=f"{slow_url}/v1", api_key="x", max_retries=0) as client:
            task = asyncio.create_task(
                client.completions.create(model="fake-model", prompt="abc", max_tokens=5000)
            )
            while not slow.running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(start_and_cancel())
    wait_for(lambda: len(slow.aborted) == before + 1)


def test_others_go_on_when_one_leaves(slow_url: str, slow: FakeEngine) -> None:
    answers: list[httpx2.Response] = []

    def stay() -> None:
        body = {"prompt": "xyz", "max_tokens": 30, "add_special_tokens": False}
        answers.append(httpx2.post(f"{slow_url}/v1/completions", json=body))

    thread = threading.Thread(target=stay)
    thread.start()
    test_leaving_a_stream_aborts(slow_url, slow, "abc")
    thread.join()
    assert answers[0].json()["choices"][0]["text"] == "xyz" * 10
