"""/v1/chat/completions through the official client, synchronous and not."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from tests.server.byte_tokenizer import BOS_ID, USER_ID
from tests.server.fake_engine import FakeEngine

ASK: list[Any] = [{"role": "user", "content": "hé"}]
PROMPT = "⟦bos⟧⟦user⟧hé⟦assistant⟧"
ANSWER = "⟦user⟧hé⟦assistant⟧"  # the fake engine repeats the prompt; BOS is no text
TOKENS = 6


@pytest.fixture
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_answer(client: OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model="fake-model", messages=ASK, max_tokens=TOKENS)
    assert engine.seen[-1][0][:2] == [BOS_ID, USER_ID]
    assert answer.object == "chat.completion"
    assert len(answer.choices) == 1
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", ANSWER)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, TOKENS)


def test_stream(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake-model",
            messages=ASK,
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [
        *([None] * (len(chunks) - 2)),
        "length",
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 12


def test_async_client_many_at_once(base_url: str) -> None:
    async def ask(client: AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": text}],
            max_tokens=3 + len(text),
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, chr(97 + i) * i) for i in range(1, 21)))

    assert asyncio.run(ask_all()) == [f"⟦user⟧{chr(97 + i) * i}⟦assistant⟧" for i in range(1, 21)]


def test_whole_conversation_with_text_parts(client: OpenAI, engine: FakeEngine) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "ignored by this template"},
        {"role": "user", "content": "d", "name": "me"},
    ]
    client.chat.completions.create(model="fake-model", messages=messages, max_tokens=1)
    text = engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)
    assert text == "⟦bos⟧[be]⟦user⟧a\nb⟦assistant⟧c⟦eos⟧⟦user⟧d⟦assistant⟧"


def test_template_arguments(client: OpenAI, engine: FakeEngine) -> None:
    extra = {"chat_template_kwargs": {"shout": True}, "add_generation_prompt": False}
    client.chat.completions.create(model="fake-model", messages=ASK, max_tokens=1, extra_body=extra)
    text = engine.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=False)
    assert text == "⟦bos⟧!⟦user⟧hé"


def test_max_completion_tokens_wins(client: OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(
        model="fake-model", messages=ASK, max_tokens=9, max_completion_tokens=2
    )
    assert engine.params() == {"max_tokens": 2}
    answer = client.chat.completions.create(model="fake-model", messages=ASK)
    assert answer.usage is not None
    assert answer.usage.total_tokens == engine.max_model_len


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: OpenAI, stream: bool) -> None:
    common: dict[str, Any] = {
        "model": "fake-model",
        "messages": ASK,
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    if stream:
        parts = [
            chunk.choices[0].logprobs
            for chunk in client.chat.completions.create(**common, stream=True)
        ]
        content = [entry for part in parts if part for entry in part.content or []]
    else:
        answer = client.chat.completions.create(**common)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in content] == ["⟦bos⟧", "⟦user⟧", "h", "�", "�"]
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "⟦bos⟧⟦user⟧hé"
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [
        ("\x00", -0.5),
        ("\x01", -1.5),
    ]


def test_logprobs_without_alternatives(client: OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(model="fake-model", messages=ASK, max_tokens=1, logprobs=True)
    assert engine.params()["logprobs"] == 0
    client.chat.completions.create(model="fake-model", messages=ASK, max_tokens=1, logprobs=False)
    assert "logprobs" not in engine.params()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(client: OpenAI, fields: Any, param: str, stream: bool) -> None:
    extra = {"messages": ASK, "stream": stream, **fields}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="fake-model", messages=[], extra_body=extra)
    assert str(caught.value.param).startswith(param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.body["message"]  # type: ignore[index]


def test_neutral_values_of_unsupported_fields_pass(client: OpenAI) -> None:
    client.chat.completions.create(
        model="fake-model",
        messages=ASK,
        max_tokens=1,
        n=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        metadata={"a": "b"},
        user="me",
        parallel_tool_calls=True,
        service_tier="auto",
    )
