"""The synchronous core: requests in, one step at a time, outputs out.

Ties scheduler, runner, sampler and cache together; knows nothing of threads, HTTP or asyncio.
"""

import random
from collections.abc import Callable, Sequence

import torch

from echokv.cache.protocol import KVCache
from echokv.config import EngineConfig
from echokv.engine.blocks import HostBlocks
from echokv.engine.build import NO_HOOKS, EngineHooks, EngineParts, build_engine_parts
from echokv.engine.offline import drive
from echokv.engine.output_stream import OutputStream
from echokv.engine.outputs import RequestOutput
from echokv.engine.request import Request
from echokv.engine.sampler import sample
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.scheduler import Scheduler
from echokv.engine.stats import EngineStats, LayerCacheStats
from echokv.errors import RequestError
from echokv.memory.pools import HostPool
from echokv.memory.slots import BLOCK_TOKENS, HostSlots


class Engine:
    """Continuous batching over one model with its KV cache in host memory.

    Args:
        config: what the user chose; `auto` values are resolved here.
        on_phase: called with a few words as start-up proceeds ("loading weights", ...).
        hooks: stand-ins of tests and benchmarks.

    Raises:
        ConfigError, CheckpointError, CapacityError, KernelUnavailable: it can't be started as
            asked; the message says what to change.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_phase: Callable[[str], None] = lambda _: None,
        hooks: EngineHooks = NO_HOOKS,
    ) -> None:
        parts = build_engine_parts(config, on_phase, hooks)
        self._on_release = hooks.on_release
        self._parts: EngineParts = parts
        self.config = parts.config
        self.plan = parts.plan
        self.tokenizer = parts.tokenizer
        self.model_name = parts.model_name
        self.max_model_len = parts.limits.max_model_len
        self.blocks = HostBlocks(
            parts.plan.num_host_blocks, enable_prefix_caching=config.enable_prefix_caching
        )
        self.scheduler = Scheduler(parts.limits, self.blocks)
        self._streams: dict[str, OutputStream] = {}
        self._seeds = random.Random(config.seed)
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def cache(self) -> KVCache:
        """The KV cache in use; for tests and tools."""
        return self._parts.cache

    @property
    def host_pool(self) -> HostPool | None:
        """The rows in host memory, None without offload; for tests and tools."""
        return self._parts.host_pool

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.scheduler.has_work

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Refuse a request that this engine can never run; thread-safe.

        Returns:
            The most tokens, prompt and output together, that it may reach.

        Raises:
            RequestError: an empty or too long prompt, a token id outside the vocabulary.
        """
        if not prompt_token_ids:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        vocab = self._parts.model_config.vocab_size
        for name, ids in (("prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
            bad = next((token for token in ids if not 0 <= token < vocab), None)
            if bad is not None:
                raise RequestError(
                    f"token id {bad} is outside the vocabulary of {vocab} tokens", param=name
                )
        return self.scheduler.check_fits(len(prompt_token_ids), params.max_tokens)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run, the queue is full or the id is in use.
        """
        max_total = self.check_request(prompt_token_ids, params)
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        request = Request(
            request_id, list(prompt_token_ids), params, max_total_tokens=max_total, seed=seed
        )
        self.scheduler.add(request)
        self._streams[request_id] = OutputStream(
            request, self.tokenizer.detokenizer(), self._parts.eos_token_ids
        )
        self._prompt_tokens += request.num_prompt_tokens

    def abort(self, request_id: str) -> RequestOutput | None:
        """Cancel a request and free its slots; None when there is no such request (any more)."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return None
        self.scheduler.finish(stream.request)
        self._release_stale()
        return stream.abort()

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it added, request by request."""
        scheduled = self.scheduler.schedule()
        self._release_stale()
        if not scheduled:
            return []
        logits = self._parts.runner.execute(scheduled)
        sampling = [item.request for item in scheduled if item.samples]
        self.scheduler.advance(scheduled)
        outputs = self._sample(logits, sampling)
        self._release_stale()
        if self.config.check_cache:
            self.cache.check(self._mask([*self.blocks.held(), *self.blocks.cached()]))
        return outputs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[list[RequestOutput]]:
        """Run prompts to their end.

        Returns:
            For each prompt, its outputs in order; the last one is finished.
        """
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        outputs: list[list[RequestOutput]] = [[] for _ in prompts]
        for index, output in drive(self, list(zip(prompts, every, strict=True))):
            outputs[index].append(output)
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot between two steps; reads counters back from the device."""
        live = self.blocks.num_held * BLOCK_TOKENS
        return EngineStats(
            requests_running=len(self.scheduler.running),
            requests_waiting=len(self.scheduler.waiting),
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self.scheduler.prefix_cache_queries,
            prefix_cache_hits=self.scheduler.prefix_cache_hits,
            host_pool_slots=self.blocks.num_blocks * BLOCK_TOKENS,
            host_pool_live_slots=live,
            host_pool_cached_slots=self.blocks.num_cached * BLOCK_TOKENS,
            device_pool_slots=self.cache.capacity,
            device_pool_live_slots=self.cache.live_rows(self._mask(self.blocks.held()))
            if live
            else 0,
            layers=tuple(
                LayerCacheStats(
                    selected_rows=counts.selected,
                    recalled_rows=counts.recalled,
                    evicted_rows=counts.evicted,
                    prefetched_useful_rows=0,
                    prefetched_wasted_rows=0,
                    resident_rows=counts.resident,
                )
                for counts in self.cache.counters()
            ),
        )

    def close(self) -> None:
        """Free the pools; the engine is unusable afterwards."""
        self._parts.close()

    def _sample(self, logits: torch.Tensor, requests: list[Request]) -> list[RequestOutput]:
        if not requests:
            return []
        outputs = []
        eos = self._parts.eos_token_ids
        for request, sampled in zip(requests, sample(logits, requests, eos), strict=True):
            output = self._streams[request.request_id].push(sampled)
            self._generation_tokens += 1
            if output.finished:
                self.scheduler.finish(request)
                del self._streams[request.request_id]
            outputs.append(output)
        return outputs

    def _release_stale(self) -> None:
        stale = self.blocks.take_stale()
        if stale:
            if self._on_release is not None:
                self._on_release(stale)
            self.cache.release(_slots_of(stale))

    def _mask(self, blocks: list[int]) -> torch.Tensor:
        """[N_H] bool: the host slots of some blocks."""
        mask = torch.zeros(self.blocks.num_blocks, BLOCK_TOKENS, dtype=torch.bool)
        mask[blocks] = True
        return mask.flatten()


def _slots_of(blocks: list[int]) -> HostSlots:
    starts = torch.tensor(blocks, dtype=torch.int32).unsqueeze(1) * BLOCK_TOKENS
    return HostSlots((starts + torch.arange(BLOCK_TOKENS, dtype=torch.int32)).flatten())
