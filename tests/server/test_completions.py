"""/v1/completions through the official client; the fake engine repeats the prompt's tokens."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from tests.server.byte_tokenizer import BOS_ID, EOS_ID
from tests.server.fake_engine import FakeEngine

from echokv.engine.tokenizer import Tokenizer

A, B, C = b"abc"


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_one_prompt(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="fake-model", prompt="abc", max_tokens=6)
    assert engine.seen[-1][0] == [BOS_ID, A, B, C]
    assert answer.object == "text_completion"
    assert answer.model == "fake-model"
    assert [choice.text for choice in answer.choices] == ["abca"]  # BOS is no text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_max_tokens_is_16_by_default_and_null_means_no_limit(
    client: OpenAI, http: httpx2.Client
) -> None:
    answer = client.completions.create(model="fake-model", prompt="abc")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    body = {"prompt": [A], "max_tokens": None}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 511


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab"], ["ab"]),
        (["ab", "c", "é"], ["ab", "cc", "é"]),
        ([A, B], ["ab"]),
        ([[A, B], [C]], ["ab", "cc"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt(
    client: OpenAI, prompt: str | list[str] | list[int], texts: list[str], stream: bool
) -> None:
    extra = {"add_special_tokens": False}
    got = [""] * len(texts)
    if stream:
        for chunk in client.completions.create(
            model="fake-model", prompt=prompt, max_tokens=2, stream=True, extra_body=extra
        ):
            for choice in chunk.choices:
                got[choice.index] += choice.text
    else:
        answer = client.completions.create(
            model="fake-model", prompt=prompt, max_tokens=2, extra_body=extra
        )
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        got = [choice.text for choice in answer.choices]
    assert got == texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "shown"), [("ab", "ab"), ([A, B], "ab"), ([BOS_ID, B], "b")])
def test_echo(client: OpenAI, prompt: str | list[int], shown: str, stream: bool) -> None:
    common: dict[str, Any] = {
        "model": "fake-model",
        "prompt": prompt,
        "max_tokens": 2,
        "echo": True,
    }
    plain = client.completions.create(**{**common, "echo": False}).choices[0].text
    if stream:
        text = "".join(
            chunk.choices[0].text for chunk in client.completions.create(**common, stream=True)
        )
    else:
        text = client.completions.create(**common).choices[0].text
    assert text == shown + plain


def test_stream_has_the_same_text_end_and_usage(client: OpenAI) -> None:
    common: dict[str, Any] = {
        "model": "fake-model",
        "prompt": ["héy", "x" + "😀" * 3],
        "max_tokens": 21,
    }
    whole = client.completions.create(**common)
    chunks = list(
        client.completions.create(**common, stream=True, stream_options={"include_usage": True})
    )
    for expected in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert "".join(c.text for c in mine) == expected.text
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == expected.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_continuous_usage(http: httpx2.Client) -> None:
    body = {
        "prompt": "abc",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    lines = [line for line in http.post("/v1/completions", json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert [f'"completion_tokens":{n}' in line for n, line in zip((2, 3), lines, strict=False)] == [
        *(True, True)
    ]  # the first token, BOS, adds no text and so makes no chunk


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: OpenAI, stream: bool) -> None:
    common: dict[str, Any] = {
        "model": "fake-model",
        "prompt": [A, 0xC3, 0xA9],
        "max_tokens": 4,
        "logprobs": 2,
    }
    if stream:
        pieces = [c.choices[0].logprobs for c in client.completions.create(**common, stream=True)]
        assert len(pieces) == 4  # a token without text of its own still has its logprobs
    else:
        pieces = [client.completions.create(**common).choices[0].logprobs]
    tokens: list[Any] = []
    logprobs: list[Any] = []
    tops: list[Any] = []
    offsets: list[Any] = []
    for piece in pieces:
        assert piece is not None
        tokens += piece.tokens or []
        logprobs += piece.token_logprobs or []
        tops += piece.top_logprobs or []
        offsets += piece.text_offset or []
    assert tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "a"]
    assert logprobs == [-0.25] * 4
    assert tops[0] == {"\x00": -0.5, "\x01": -1.5, "a": -0.25}
    assert offsets == [0, 1, 1, 2]


def test_logprobs_of_zero_alternatives(client: OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="a", max_tokens=1, logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.token_logprobs or []) == 1


def test_stop_token_and_end_of_sequence(client: OpenAI, engine: FakeEngine) -> None:
    prompt = [A, B, EOS_ID, C]
    answer = client.completions.create(model="fake-model", prompt=prompt)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    answer = client.completions.create(
        model="fake-model", prompt=prompt, extra_body={"ignore_eos": True, "stop_token_ids": [C]}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == C


def test_sampling_parameters_reach_the_engine(client: OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model="fake-model", prompt="a")
    assert engine.params() == {"max_tokens": 16}
    given: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "seed": -(2**63),
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "logprobs": 3,
        "max_tokens": 7,
    }
    extra = {
        "top_k": 3,
        "min_p": 0.25,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
    }
    client.completions.create(
        model="fake-model", prompt="a", stop=["x", "é"], **given, extra_body=extra
    )
    assert engine.params() == given | extra | {"stop": ("x", "é"), "stop_token_ids": (5, 6)}
    client.completions.create(model="fake-model", prompt="a", stop="xy")
    assert engine.params()["stop"] == ("xy",)


def test_unknown_and_neutral_fields_are_ignored(client: OpenAI) -> None:
    client.completions.create(
        model="fake-model",
        prompt="a",
        n=1,
        best_of=1,
        logit_bias={},
        user="me",
        extra_body={"what_is_this": [1], "suffix": None, "response_format": {"type": "text"}},
    )


def test_models(client: OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["fake-model"]
    assert client.models.retrieve("fake-model") == models[0]


def test_a_large_vocabulary_of_the_model_is_no_obstacle(
    client: OpenAI, tokenizer: Tokenizer
) -> None:
    beyond = tokenizer.vocab_size + 5  # the model's padded vocabulary has it
    answer = client.completions.create(model="fake-model", prompt=[A, beyond, B], max_tokens=3)
    assert answer.choices[0].text == "ab"
