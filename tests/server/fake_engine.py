"""A deterministic engine without a model: output token i is prompt token i, round and round.

What a test can expect is therefore known without running anything. EOS in the prompt ends the
output, as a model's would; the byte 0x01 makes the engine fail at that token.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

from echokv.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats, LayerCacheStats
from echokv.engine.tokenizer import Tokenizer
from echokv.errors import EchoKVError, RequestError

FAILING_TOKEN = 1
VOCAB_SIZE = 300  # the model's; the tokenizer has fewer

LAYERS = (
    LayerCacheStats(
        selected_rows=200,
        recalled_rows=50,
        evicted_rows=7,
        prefetched_useful_rows=3,
        prefetched_wasted_rows=2,
        resident_rows=40,
    ),
    LayerCacheStats(
        selected_rows=0,
        recalled_rows=0,
        evicted_rows=0,
        prefetched_useful_rows=0,
        prefetched_wasted_rows=0,
        resident_rows=0,
    ),
)


class FakeEngine:
    """See the module; attributes may be changed by a test at any time."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        ready: bool = True,
        max_model_len: int = 512,
        token_delay_s: float = 0.0,
        start_error: Exception | None = None,
        load_s: float = 0.0,
        failing_token: int = FAILING_TOKEN,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = "fake-model"
        self.max_model_len = max_model_len
        self.phase = "ready" if ready else "loading weights"
        self.token_delay_s = token_delay_s
        self.start_error = start_error
        self.load_s = load_s
        self.loaded = asyncio.Event()  # ends the load before its time
        self.failing_token = failing_token
        self.max_requests = 64
        self.running: dict[str, SamplingParams] = {}
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.aborted: list[str] = []
        self.stopped = False
        self.prompt_tokens = 0
        self.generation_tokens = 0

    @property
    def is_ready(self) -> bool:
        return self.phase == "ready"

    async def start(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.loaded.wait(), self.load_s)
        if self.start_error is not None:
            self.phase = "failed"
            raise self.start_error
        self.phase = "ready"

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        limit = self._check(prompt_token_ids, params)
        self.seen.append((prompt_token_ids, params))
        self.running[request_id] = params
        self.prompt_tokens += len(prompt_token_ids)
        stream = self.tokenizer.detokenizer()
        try:
            for count in range(1, limit + 1):
                await asyncio.sleep(self.token_delay_s)
                if self.stopped:
                    raise EchoKVError("the engine was stopped")
                token = prompt_token_ids[(count - 1) % len(prompt_token_ids)]
                if token == self.failing_token:
                    raise RuntimeError("the fake engine failed as asked")
                reason = self._reason(token, count, limit, params)
                self.generation_tokens += 1
                text = stream.push(token) + (stream.flush() if reason else "")
                yield RequestOutput(
                    request_id=request_id,
                    token_ids=(token,),
                    text=text,
                    logprobs=self._logprobs(token, params),
                    finish_reason=reason,
                    stop_reason=token if token in params.stop_token_ids else None,
                    num_prompt_tokens=len(prompt_token_ids),
                    num_output_tokens=count,
                    num_cached_tokens=len(prompt_token_ids) // 2,
                )
                if reason:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            del self.running[request_id]

    async def stats(self) -> EngineStats:
        return EngineStats(
            requests_running=len(self.running),
            requests_waiting=5,
            preemptions=4,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            prefix_cache_queries=100,
            prefix_cache_hits=25,
            host_pool_slots=6400,
            host_pool_live_slots=1600,
            host_pool_cached_slots=640,
            device_pool_slots=1280,
            device_pool_live_slots=99,
            layers=LAYERS,
        )

    async def drain(self, timeout_s: float) -> bool:
        self.phase = "draining"
        deadline = time.monotonic() + timeout_s
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return not self.running

    def stop(self) -> None:
        self.stopped = True
        self.phase = "stopped"

    def params(self) -> dict[str, object]:
        """The parameters of the latest request that differ from the defaults."""
        given, default = self.seen[-1][1], SamplingParams()
        return {
            field.name: getattr(given, field.name)
            for field in dataclasses.fields(given)
            if getattr(given, field.name) != getattr(default, field.name)
        }

    def _check(self, prompt: list[int], params: SamplingParams) -> int:
        if len(self.running) >= self.max_requests:
            raise RequestError(f"{len(self.running)} requests wait already", code="queue_full")
        bad = [token for token in (*prompt, *params.stop_token_ids) if not 0 <= token < VOCAB_SIZE]
        if bad:
            raise RequestError(
                f"token id {bad[0]} is outside the vocabulary of {VOCAB_SIZE} tokens",
                param="prompt" if bad[0] in prompt else "stop_token_ids",
            )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but max_model_len is {self.max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        limit = self.max_model_len - len(prompt)
        if params.max_tokens is None:
            return limit
        if params.max_tokens > limit:
            raise RequestError(f"max_tokens {params.max_tokens} is too large", param="max_tokens")
        return params.max_tokens

    def _reason(
        self, token: int, count: int, limit: int, params: SamplingParams
    ) -> FinishReason | None:
        ends = token in params.stop_token_ids
        ends |= token in self.tokenizer.eos_token_ids and not params.ignore_eos
        if ends and count >= params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == limit else None

    def _logprobs(self, token: int, params: SamplingParams) -> tuple[TokenLogprobs, ...]:
        if params.logprobs is None:
            return ()
        top = tuple((rank, -0.5 - rank) for rank in range(params.logprobs))
        return (TokenLogprobs(token_id=token, logprob=-0.25, top=top),)
