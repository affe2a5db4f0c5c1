"""/v1/completions: several prompts are several choices, streamed or not."""

import time
import uuid

from fastapi import Request, Response

from echokv.engine.outputs import RequestOutput
from echokv.engine.tokenizer import Tokenizer
from echokv.server.generation import (
    Collected,
    IndexedOutputs,
    SubRequest,
    collect,
    run_all,
    usage_of,
)
from echokv.server.logprobs import CompletionLogprobsBuilder
from echokv.server.parameters import completion_params
from echokv.server.prompts import Prompt, completion_prompts
from echokv.server.responses import CompletionChoice, CompletionResponse, Usage
from echokv.server.schema import CompletionRequest
from echokv.server.state import ServerState, json_response
from echokv.server.streaming import Events, or_disconnect, start_event_stream


async def create_completion(
    state: ServerState, request: CompletionRequest, http: Request
) -> Response:
    """Answer a completion request; the client going away aborts it."""
    engine = state.engine_for(request.model)
    params = completion_params(request)
    prompts = await completion_prompts(request, engine.tokenizer)
    reply = _Reply(request, prompts, engine.tokenizer, engine.model_name)
    outputs = run_all(
        engine,
        state.metrics,
        [
            SubRequest(
                request_id=f"{reply.id}-{index}", prompt_token_ids=prompt.token_ids, params=params
            )
            for index, prompt in enumerate(prompts)
        ],
    )
    if request.stream:
        return await start_event_stream(http, reply.events(outputs))
    collected = await or_disconnect(http.receive, collect(outputs, len(prompts)))
    return json_response(reply.whole(collected))


class _Reply:
    """Turns engine outputs into the response objects of one request."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: list[Prompt],
        tokenizer: Tokenizer,
        model_name: str,
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._request = request
        self._model = model_name
        self._created = int(time.time())
        self._echoes = [_echo(prompt, tokenizer) if request.echo else "" for prompt in prompts]
        self._logprobs = [CompletionLogprobsBuilder(tokenizer) for _ in prompts]

    def whole(self, collected: list[Collected]) -> CompletionResponse:
        """The response that isn't streamed."""
        choices = []
        for index, item in enumerate(collected):
            wanted = self._request.logprobs is not None
            choices.append(
                CompletionChoice(
                    index=index,
                    text=self._echoes[index] + "".join(item.text),
                    logprobs=self._logprobs[index].piece(item.logprobs) if wanted else None,
                    finish_reason=item.finish_reason.value,
                    stop_reason=item.stop_reason,
                )
            )
        return CompletionResponse(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage_of([item.last for item in collected]),
        )

    async def events(self, outputs: IndexedOutputs) -> Events:
        """The chunks of the stream."""
        latest: list[RequestOutput | None] = [None] * len(self._echoes)
        try:
            async for index, output in outputs:
                echo = self._echoes[index] if latest[index] is None else ""
                latest[index] = output
                if output.text or echo or output.logprobs or output.finished:
                    usage = usage_of(latest) if self._request.continuous_usage else None
                    yield self._chunk([self._piece(index, echo, output)], usage)
            if self._request.include_usage:
                yield self._chunk([], usage_of(latest))
        finally:
            await outputs.aclose()

    def _piece(self, index: int, echo: str, output: RequestOutput) -> CompletionChoice:
        builder = self._logprobs[index]
        return CompletionChoice(
            index=index,
            text=echo + output.text,
            logprobs=builder.piece(output.logprobs) if output.logprobs else None,
            finish_reason=output.finish_reason.value if output.finish_reason else None,
            stop_reason=output.stop_reason,
        )

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionResponse:
        chunk = CompletionResponse(
            id=self.id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if self._request.include_usage or usage is not None:
            chunk.usage = usage
        return chunk


def _echo(prompt: Prompt, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
