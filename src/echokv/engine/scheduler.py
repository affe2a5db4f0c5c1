"""Which tokens of which requests the next step computes.

Continuous batching with chunked prefill: running requests first, oldest first, then the head of
the queue. Moves requests between queues and blocks between owners; touches no tensor.
"""

from collections import deque
from dataclasses import dataclass

from echokv.engine.blocks import HostBlocks
from echokv.engine.request import Request, RequestStatus
from echokv.errors import RequestError
from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT, blocks_for


@dataclass(frozen=True, kw_only=True)
class ScheduledRequest:
    """A request's share of a step: tokens [start, start + count) of its token_ids."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's last token, so that a new one is sampled.

        True to its name until `Scheduler.advance` counts that new one.
        """
        return self.start + self.count == self.request.length


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Capacities that admission goes by.

    Attributes:
        max_running: requests running at once, from --max-num-seqs and the device pool.
        max_batched_tokens: tokens a step (--max-num-batched-tokens).
        max_waiting: queued requests beyond which new ones are refused.
        max_model_len: most tokens of prompt and output together.
    """

    max_running: int
    max_batched_tokens: int
    max_waiting: int
    max_model_len: int


class Scheduler:
    """The queues and the admission over both pools.

    A request is admitted when the host pool can hold all its tokens of now and the device pool
    has room for one more running request; it is preempted, newest first, when the host pool can't
    hold a running request's next token, and then resumes by recomputing (or finding in the prefix
    cache) all its tokens.
    """

    def __init__(self, limits: SchedulerLimits, blocks: HostBlocks) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._free_request_slots = list(reversed(range(limits.max_running)))
        self._new_request_slots: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self.waiting or self.running)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Refuse a request that can never run.

        Returns:
            The most tokens, prompt and output together, that the request may reach.

        Raises:
            RequestError: too long for max_model_len or for the host pool, with the numbers.
        """
        limit = self.limits.max_model_len
        if num_prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {limit} tokens"
                " for prompt and output together (--max-model-len)",
                param="prompt",
                code="context_length_exceeded",
            )
        if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
            raise RequestError(
                f"max_tokens {max_tokens} and a prompt of {num_prompt_tokens} tokens exceed"
                f" max_model_len {limit} (--max-model-len)",
                param="max_tokens",
                code="context_length_exceeded",
            )
        total = limit if max_tokens is None else num_prompt_tokens + max_tokens
        capacity = self.blocks.num_blocks * BLOCK_TOKENS
        if total > capacity and max_tokens is not None:
            raise RequestError(
                f"the request needs {total} host slots, the host pool has {capacity}"
                " (--host-pool-gib)",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return min(total, capacity)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the queue is full (code `queue_full`).
        """
        if len(self.waiting) >= self.limits.max_waiting:
            raise RequestError(
                f"{len(self.waiting)} requests are waiting already, the limit is"
                f" {self.limits.max_waiting} (--max-waiting-requests)",
                code="queue_full",
            )
        self.waiting.append(request)

    def take_new_request_slots(self) -> list[int]:
        """Slots of requests that began to run since the last call: what was learnt is void."""
        slots, self._new_request_slots = self._new_request_slots, []
        return slots

    def can_run_ahead(self) -> bool:
        """Whether the next step can be chosen while the results of the last one are unknown.

        Not when it would preempt: a request that turns out to have ended gives its blocks back,
        so the victim would be chosen too early, and one with a pending token can't be recomputed.
        Not when a penalty needs the tokens themselves.
        """
        missing = 0
        for request in self.running:
            if request.params.is_penalised:
                return False
            missing += max(0, blocks_for(request.length) - len(request.block_ids))
        return missing <= self.blocks.num_available

    def schedule(self) -> list[ScheduledRequest]:
        """Choose the next step's tokens and give them host blocks.

        A request whose pending token is surely its last is left alone; any other pending token is
        scheduled as if the request went on after it.
        """
        budget = self.limits.max_batched_tokens
        preemptions_before = self.num_preemptions
        scheduled: list[ScheduledRequest] = []
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING or budget == 0:
                continue  # preempted by an older one in this very loop
            if request.length >= request.max_total_tokens and request.num_pending_tokens:
                continue
            count = min(request.length - request.num_computed_tokens, budget)
            if self._extend(request, request.num_computed_tokens + count):
                scheduled.append(self._share(request, count))
                budget -= count
        preempting = self.num_preemptions > preemptions_before
        while not preempting and budget and self.waiting and self._can_admit(self.waiting[0]):
            request = self.waiting.popleft()
            self._admit(request)
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            scheduled.append(self._share(request, count))
            budget -= count
        return scheduled

    def advance(self, scheduled: list[ScheduledRequest]) -> None:
        """Note that the scheduled rows are being written, and tokens sampled, by a launched step.

        Full blocks of known tokens enter the prefix cache: whoever finds them reads them in a
        later step.
        """
        for item in scheduled:
            request = item.request
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_pending_tokens += item.samples
            request.num_computed_tokens = item.start + item.count
            known = min(request.num_computed_tokens, request.num_tokens)
            self._register(request, item.start // BLOCK_TOKENS, known // BLOCK_TOKENS)

    def settle(self, request: Request) -> None:
        """Note that a running request's pending token is known; call after it was appended.

        A block that it completes, and whose rows are being written already, enters the prefix
        cache.
        """
        request.num_pending_tokens -= 1
        full, rest = divmod(request.num_tokens, BLOCK_TOKENS)
        if rest == 0 and request.num_computed_tokens >= request.num_tokens:
            self._register(request, full - 1, full)

    def finish(self, request: Request) -> None:
        """Take a request out of its queue, whichever it is in, and drop its blocks."""
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        self._drop_blocks(request)

    def _register(self, request: Request, first: int, last: int) -> None:
        """Enter blocks [first, last) of a request, which are full, into the prefix cache."""
        if first < last:
            hashes = request.block_hashes()
            for index in range(first, last):
                self.blocks.register(request.block_ids[index], hashes[index])

    def _share(self, request: Request, count: int) -> ScheduledRequest:
        return ScheduledRequest(request=request, start=request.num_computed_tokens, count=count)

    def _extend(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks for num_tokens, preempting newer ones if need be."""
        missing = blocks_for(num_tokens) - len(request.block_ids)
        while missing > self.blocks.num_available:
            victim = self.running[-1]
            assert victim.num_pending_tokens == 0, "see can_run_ahead"
            self._preempt(victim)
            if victim is request:
                return False
        if missing > 0:
            request.block_ids += self.blocks.allocate(missing)
        return True

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        self._drop_blocks(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _can_admit(self, request: Request) -> bool:
        if len(self.running) >= self.limits.max_running:
            return False
        prefix = self._cached_prefix(request)
        needed = blocks_for(request.num_tokens) - len(prefix)
        # One spare block a running request: else the newcomer would soon be preempted for them.
        return needed + len(self.running) <= self.blocks.num_available_beside(prefix)

    def _admit(self, request: Request) -> None:
        prefix = self._cached_prefix(request)
        self.blocks.hold(prefix)
        needed = blocks_for(request.num_tokens) - len(prefix)
        request.block_ids = prefix + self.blocks.allocate(needed)
        request.num_computed_tokens = len(prefix) * BLOCK_TOKENS
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_cached_tokens
        request.status = RequestStatus.RUNNING
        request.request_slot = self._free_request_slots.pop()
        self._new_request_slots.append(request.request_slot)
        self.running.append(request)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._free_request_slots.append(request.request_slot)
        request.request_slot = NO_SLOT

    def _cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks of a request, leaving at least its last token to be computed."""
        usable = (request.num_tokens - 1) // BLOCK_TOKENS
        return self.blocks.find_prefix(request.block_hashes()[:usable])

    def _drop_blocks(self, request: Request) -> None:
        self.blocks.release(request.block_ids)
        request.block_ids = []
