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
from echokv.engine.in_flight import StepInFlight
from echokv.engine.offline import drive
from echokv.engine.output_stream import OutputStream
from echokv.engine.outputs import RequestOutput
from echokv.engine.request import Request, RequestStatus
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.scheduler import Scheduler
from echokv.engine.stats import EngineStats, LayerCacheStats
from echokv.errors import RequestError
from echokv.log import get_logger
from echokv.memory.pools import HostPool
from echokv.memory.slots import BLOCK_TOKENS, HostSlots

logger = get_logger(__name__)


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
        self._on_predictions = hooks.on_predictions
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
        self._runs_ahead = config.async_scheduling and hooks.observer is None
        if config.async_scheduling and not self._runs_ahead:
            logger.info("async scheduling is off: selections are being observed")
        self._in_flight: StepInFlight | None = None
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
        return self.scheduler.has_work or self._in_flight is not None

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
        """Launch one step and return what the one before it added, request by request.

        Without async scheduling, and while the next step depends on this one's tokens
        (`Scheduler.can_run_ahead`), return what this one added.
        """
        outputs = []
        if not (self._runs_ahead and self.scheduler.can_run_ahead()):
            outputs += self._collect()
        scheduled = self.scheduler.schedule()
        self._release_stale()
        launched = None
        if scheduled:
            self._prepare_predictions()
            launched = self._parts.runner.launch(scheduled)
            self.scheduler.advance(scheduled)
        outputs += self._collect()
        self._in_flight = launched
        if not self._runs_ahead:
            outputs += self._collect()
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
                    prefetched_useful_rows=counts.useful,
                    prefetched_wasted_rows=counts.prefetched - counts.useful,
                    resident_rows=counts.resident,
                )
                for counts in self.cache.counters()
            ),
        )

    def close(self) -> None:
        """Free the pools; the engine is unusable afterwards."""
        self._parts.close()

    def _collect(self) -> list[RequestOutput]:
        """Wait for the step in flight, if there is one, and push its tokens to their requests.

        A token of a request that has ended meanwhile, by an abort or by the token before, is
        dropped.
        """
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        outputs = []
        for request, sampled in zip(step.requests, step.read(), strict=True):
            if request.status is RequestStatus.FINISHED:
                continue
            output = self._streams[request.request_id].push(sampled)
            self._generation_tokens += 1
            if output.finished:
                self.scheduler.finish(request)
                del self._streams[request.request_id]
            else:
                self.scheduler.settle(request)
            outputs.append(output)
        self._release_stale()
        return outputs

    def _prepare_predictions(self) -> None:
        """What was learnt about earlier requests says nothing about those that begin to run."""
        new = self.scheduler.take_new_request_slots()
        if self._parts.predictions is None:
            return
        self._parts.predictions.forget(new)
        if self._on_predictions is not None:
            self._on_predictions(self._parts.predictions)

    def _release_stale(self) -> None:
        stale = self.blocks.take_stale()
        if stale:
            if self._on_release is not None:
                self._on_release(stale)
            self.cache.release(_slots_of(stale, pin=self.config.device == "cuda"))

    def _mask(self, blocks: list[int]) -> torch.Tensor:
        """[N_H] bool: the host slots of some blocks."""
        mask = torch.zeros(self.blocks.num_blocks, BLOCK_TOKENS, dtype=torch.bool)
        mask[blocks] = True
        return mask.flatten()


def _slots_of(blocks: list[int], *, pin: bool) -> HostSlots:
    """All host slots of some blocks; pinned, they are copied without waiting for the device."""
    starts = torch.tensor(blocks, dtype=torch.int32).unsqueeze(1) * BLOCK_TOKENS
    slots = (starts + torch.arange(BLOCK_TOKENS, dtype=torch.int32)).flatten()
    return HostSlots(slots.pin_memory() if pin else slots)
