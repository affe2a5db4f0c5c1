"""From a request's fields to the engine's `SamplingParams`; refuses what can't be honoured.

A field that clients know from OpenAI or vLLM and that would change the output is never ignored:
it is supported, at its neutral value, or an error. Fields that nobody knows are ignored (vLLM).
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from echokv.engine.sampling_params import SamplingParams
from echokv.server.errors import ApiError
from echokv.server.schema import ChatCompletionRequest, CompletionRequest, GenerationBody

_NEUTRAL_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    # vLLM's
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

_NEUTRAL_COMPLETION: Mapping[str, tuple[Any, ...]] = {**_NEUTRAL_EVERYWHERE, "suffix": ("",)}

_NEUTRAL_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_NEUTRAL_EVERYWHERE,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "echo": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
}

_SAMPLING_FIELDS = tuple(
    field.name for field in fields(SamplingParams) if field.name not in ("logprobs", "max_tokens")
)


def completion_params(request: CompletionRequest) -> SamplingParams:
    """The sampling parameters of a text completion.

    Raises:
        ApiError: a field that is not supported.
        RequestError: a value out of range.
    """
    _refuse_unsupported(request, _NEUTRAL_COMPLETION)
    if request.echo and request.logprobs is not None:
        raise ApiError(
            400,
            "echo can't be combined with logprobs: prompt tokens have no log-probabilities here",
            param="echo",
        )
    return _sampling_params(request, max_tokens=request.max_tokens, logprobs=request.logprobs)


def chat_params(request: ChatCompletionRequest) -> SamplingParams:
    """The sampling parameters of a chat completion; errors as of `completion_params`."""
    _refuse_unsupported(request, _NEUTRAL_CHAT)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = request.max_completion_tokens
    return _sampling_params(
        request,
        max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def _sampling_params(
    request: GenerationBody, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in _SAMPLING_FIELDS
        if getattr(request, name) is not None
    }
    if "stop" in given:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(given["stop"])
    if "stop_token_ids" in given:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)


def _refuse_unsupported(request: GenerationBody, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in (request.model_extra or {}).items():
        allowed = neutral.get(name)
        if allowed is None or value is None or _is_one_of(value, allowed):
            continue
        rule = " or ".join(repr(item) for item in allowed)
        raise ApiError(
            400,
            f"{name} is not supported" + (f" other than {rule}" if rule else ""),
            param=name,
            code="unsupported_parameter",
        )


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equality of JSON values: True is not 1."""
    return any(type(value) is type(item) and value == item for item in allowed)
