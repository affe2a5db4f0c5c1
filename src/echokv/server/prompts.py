"""From a request's prompt or messages to token ids.

Tokenising runs in a thread: a prompt of 100K tokens takes long enough to stall every stream.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from echokv.engine.tokenizer import Tokenizer
from echokv.server.errors import ApiError
from echokv.server.schema import MAX_PROMPTS, ChatMessage, CompletionRequest


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the model reads.

    Attributes:
        token_ids: not checked against the vocabulary; the engine does that.
        text: as the client wrote it; None when the client sent token ids.
    """

    token_ids: list[int]
    text: str | None


async def completion_prompts(request: CompletionRequest, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of a text completion, in order.

    Raises:
        ApiError: an empty prompt, none at all, or too many.
    """
    given = _as_list_of_prompts(request.prompt)
    if not given:
        raise ApiError(400, "prompt is an empty list: at least one is needed", param="prompt")
    if len(given) > MAX_PROMPTS:
        raise ApiError(
            400, f"{len(given)} prompts in one request, at most {MAX_PROMPTS}", param="prompt"
        )
    for index, item in enumerate(given):
        if not item:
            where = f"prompt {index} of {len(given)}" if len(given) > 1 else "the prompt"
            raise ApiError(400, f"{where} is empty: at least one token is needed", param="prompt")
    prompts = []
    for item in given:
        if isinstance(item, str):
            ids = await encode(tokenizer, item, add_special_tokens=request.add_special_tokens)
            prompts.append(Prompt(token_ids=ids, text=item))
        else:
            prompts.append(Prompt(token_ids=item, text=None))
    return prompts


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool,
    template_kwargs: dict[str, Any] | None,
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation.

    Raises:
        ApiError: a message with tool calls.
        RequestError: the chat template refuses the messages.
    """
    for index, message in enumerate(messages):
        if (message.model_extra or {}).get("tool_calls"):
            path = f"messages[{index}].tool_calls"
            raise ApiError(
                400, f"{path} is not supported", param=path, code="unsupported_parameter"
            )
    text = await asyncio.to_thread(
        tokenizer.render_chat_template,
        [message.for_template() for message in messages],
        add_generation_prompt,
        **(template_kwargs or {}),
    )
    return await encode(tokenizer, text, add_special_tokens=add_special_tokens)


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """`Tokenizer.encode` in a thread."""
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


def _as_list_of_prompts(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[str | list[int]] = []
    token_ids: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            token_ids.append(item)
        else:
            prompts.append(item)
    return [token_ids] if token_ids else prompts
