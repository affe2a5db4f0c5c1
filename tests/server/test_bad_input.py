"""Nothing that a client sends makes a 5xx: every refusal is a 4xx that says what and why."""

import json
import socket
from typing import Any

import httpx2
import pytest
from tests.server.fake_engine import FakeEngine


def error(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) <= 1000
    info: dict[str, Any] = body["error"]
    return info


def post_raw(http: httpx2.Client, body: bytes, path: str = "/v1/completions") -> httpx2.Response:
    return http.post(path, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b"null",
        b"[]",
        b'"prompt"',
        b"3",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',  # a surrogate in (invalid) UTF-8
        b'{"prompt": "\\ud800"}',
        b'{"x": ["\\udfff"], "prompt": "a"}',
        b'{"\\ud800": 1}',
        b"\xfe\xff\x00{\x00}",  # UTF-16
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b'{"seed": ' + b"1" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object(http: httpx2.Client, path: str, body: bytes) -> None:
    error(post_raw(http, body, path))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "a string"),
        ({"prompt": 5}, "prompt", "a string"),
        ({"prompt": {}}, "prompt", "a string"),
        ({"prompt": ["a", 5]}, "prompt", "a list of strings"),
        ({"prompt": [1, True]}, "prompt", "token ids"),
        ({"prompt": [1.5]}, "prompt", "token ids"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "prompt 1 of 2 is empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [[1], []]}, "prompt", "prompt 1 of 2 is empty"),
        ({"prompt": ["a"] * 1025}, "prompt", "1025 prompts in one request, at most 1024"),
        ({"prompt": [300]}, "prompt", "token id 300 is outside the vocabulary of 300"),
        ({"prompt": [-1]}, "prompt", "token id -1"),
        ({"prompt": [2**70]}, "prompt", str(2**70)),
        ({"prompt": "x" * 600}, "prompt", "601 tokens, but max_model_len is 512"),
        ({"prompt": [5] * 512}, "prompt", "512 tokens, but max_model_len is 512"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -5}, "max_tokens", "-5"),
        ({"max_tokens": 512}, "max_tokens", "512"),
        ({"max_tokens": 2**70}, "max_tokens", ""),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"min_tokens": 17}, "min_tokens", "16"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"temperature": 2.5}, "temperature", "2.5"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": 10**400}, "temperature", ""),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_p": 1.01}, "top_p", "1.01"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"top_k": 2**70}, "top_k", ""),
        ({"min_p": 1.5}, "min_p", "1.5"),
        ({"seed": 2**63}, "seed", ""),
        ({"seed": 2**70}, "seed", ""),
        ({"seed": 1.5}, "seed", "integer"),
        ({"presence_penalty": 3}, "presence_penalty", "3"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"logprobs": 21}, "logprobs", "21"),
        ({"logprobs": -1}, "logprobs", "-1"),
        ({"logprobs": 1, "echo": True}, "echo", "logprobs"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": ""}, "stop", "non-empty"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": [5]}, "stop", "a string or a list"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "300"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids[0]", ""),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": 5}, "stream_options", ""),
        ({"model": 5}, "model", "string"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"n": 2}, "n", "not supported other than 1"),
        ({"n": "many"}, "n", "not supported"),
        ({"logit_bias": {"5": 100}}, "logit_bias", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_fields_are_named(
    http: httpx2.Client, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    body = {
        "prompt": "a",
        **({"stream": True} if stream and "stream_options" not in fields else {}),
    }
    info = error(post_raw(http, json.dumps(body | fields).encode()))
    assert info["param"] == param
    assert words in info["message"]
    assert info["type"] == "invalid_request_error"


def test_a_long_prompt_has_a_code_that_clients_know(http: httpx2.Client) -> None:
    info = error(http.post("/v1/completions", json={"prompt": "x" * 600}))
    assert info["code"] == "context_length_exceeded"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"])
def test_numbers_without_a_value(http: httpx2.Client, number: str) -> None:
    body = f'{{"prompt": "a", "temperature": {number}}}'
    assert error(post_raw(http, body.encode()))["param"] in ("temperature", None)


def test_missing_prompt(http: httpx2.Client) -> None:
    assert error(http.post("/v1/completions", json={}))["param"] == "prompt"
    assert error(http.post("/v1/chat/completions", json={}))["param"] == "messages"
    assert error(http.post("/detokenize", json={}))["param"] == "tokens"


def test_long_values_are_not_sent_back_whole(http: httpx2.Client) -> None:
    error(http.post("/v1/completions", json={"prompt": "a", "stop": ["", "x" * 50_000]}))
    error(http.post("/v1/completions", json={"prompt": "a", "model": "x" * 50_000}), 404)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unknown_model(http: httpx2.Client, path: str) -> None:
    body = {"model": "gpt", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    info = error(http.post(path, json=body), 404)
    assert (info["param"], info["code"]) == ("model", "model_not_found")
    assert "'gpt'" in info["message"]
    assert "'fake-model'" in info["message"]


def test_unknown_paths_and_methods(http: httpx2.Client) -> None:
    error(http.get("/v1/nothing"), 404)
    error(http.get("/v1/completions"), 405)
    error(http.get("/v1/models/other"), 404)
    error(http.get("/v1/models/%FF%00"), 404)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "\xff"])
def test_content_type(http: httpx2.Client, kind: str) -> None:
    headers = [(b"Content-Type", kind.encode("latin-1"))] if kind else []
    answer = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert "application/json" in error(answer, 415)["message"]


def test_content_type_with_parameters_is_fine(http: httpx2.Client) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_body_over_the_limit(http: httpx2.Client) -> None:
    body = json.dumps({"prompt": "a" * 100_001}).encode()
    info = error(post_raw(http, body), 413)
    assert "100000 bytes" in info["message"]
    headers = {"Content-Type": "application/json"}
    chunks = (body[i : i + 1000] for i in range(0, len(body), 1000))  # no Content-Length
    error(http.post("/v1/completions", content=chunks, headers=headers), 413)


def test_too_many_waiting_requests(http: httpx2.Client, engine: FakeEngine) -> None:
    engine.max_requests = 0
    try:
        for stream in (False, True):
            answer = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
            assert error(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
    finally:
        engine.max_requests = 64


def test_something_that_is_not_http(base_url: str, http: httpx2.Client) -> None:
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert http.get("/health").status_code == 200


def test_client_that_leaves_within_its_body(base_url: str, http: httpx2.Client) -> None:
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"messages": []}])
def test_tokenize_wants_one_of_two(http: httpx2.Client, body: dict[str, Any]) -> None:
    error(http.post("/tokenize", json=body))


@pytest.mark.parametrize("token", [260, -1, 2**70])
def test_detokenize_unknown_token(http: httpx2.Client, token: int) -> None:
    info = error(http.post("/detokenize", json={"tokens": [1, token]}))
    assert f"token id {token} is outside the vocabulary of 260 tokens" in info["message"]
