"""/v1/chat/completions: the chat template makes a prompt, the answer is one message."""

import time
import uuid
from collections.abc import Mapping

from fastapi import Request, Response

from echokv.engine.outputs import RequestOutput
from echokv.engine.tokenizer import Tokenizer
from echokv.server.errors import renamed_params
from echokv.server.generation import (
    Collected,
    IndexedOutputs,
    SubRequest,
    collect,
    run_all,
    usage_of,
)
from echokv.server.logprobs import chat_logprobs
from echokv.server.parameters import chat_params
from echokv.server.prompts import chat_prompt
from echokv.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprobs,
    Delta,
    Usage,
)
from echokv.server.schema import ChatCompletionRequest
from echokv.server.state import ServerState, json_response
from echokv.server.streaming import Events, or_disconnect, start_event_stream


async def create_chat_completion(
    state: ServerState, request: ChatCompletionRequest, http: Request
) -> Response:
    """Answer a chat request; the client going away aborts it."""
    engine = state.engine_for(request.model)
    with renamed_params(_client_names(request)):
        params = chat_params(request)
        token_ids = await chat_prompt(
            engine.tokenizer,
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            template_kwargs=request.chat_template_kwargs,
        )
        reply = _Reply(request, engine.tokenizer, engine.model_name)
        subrequest = SubRequest(request_id=reply.id, prompt_token_ids=token_ids, params=params)
        outputs = run_all(engine, state.metrics, [subrequest])
        if request.stream:
            return await start_event_stream(http, reply.events(outputs))
        collected = await or_disconnect(http.receive, collect(outputs, 1))
        return json_response(reply.whole(collected[0]))


def _client_names(request: ChatCompletionRequest) -> Mapping[str, str]:
    """What the client calls the engine's parameters."""
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


class _Reply:
    """Turns engine outputs into the response objects of one request."""

    def __init__(
        self, request: ChatCompletionRequest, tokenizer: Tokenizer, model_name: str
    ) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._request = request
        self._tokenizer = tokenizer
        self._model = model_name
        self._created = int(time.time())

    def whole(self, collected: Collected) -> ChatCompletionResponse:
        """The response that isn't streamed."""
        wanted = self._request.logprobs
        choice = ChatChoice(
            index=0,
            message=AssistantMessage(content="".join(collected.text)),
            logprobs=chat_logprobs(self._tokenizer, collected.logprobs) if wanted else None,
            finish_reason=collected.finish_reason.value,
            stop_reason=collected.stop_reason,
        )
        return ChatCompletionResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=usage_of([collected.last]),
        )

    async def events(self, outputs: IndexedOutputs) -> Events:
        """The chunks of the stream: the role, the text, the end, the usage."""
        latest: RequestOutput | None = None
        try:
            async for _, output in outputs:
                usage = usage_of([output]) if self._request.continuous_usage else None
                if latest is None:
                    yield self._chunk([_role_choice()], usage)
                latest = output
                if output.text or output.logprobs or output.finished:
                    yield self._chunk([self._piece(output)], usage)
            if self._request.include_usage:
                yield self._chunk([], usage_of([latest]))
        finally:
            await outputs.aclose()

    def _piece(self, output: RequestOutput) -> ChatChunkChoice:
        logprobs: ChatLogprobs | None = None
        if output.logprobs:
            logprobs = chat_logprobs(self._tokenizer, output.logprobs)
        return ChatChunkChoice(
            index=0,
            delta=Delta(content=output.text) if output.text or logprobs else Delta(),
            logprobs=logprobs,
            finish_reason=output.finish_reason.value if output.finish_reason else None,
            stop_reason=output.stop_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if self._request.include_usage or usage is not None:
            chunk.usage = usage
        return chunk


def _role_choice() -> ChatChunkChoice:
    delta = Delta(role="assistant", content="")
    return ChatChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=None)
