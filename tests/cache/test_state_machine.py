"""Random lives of requests against the offloaded cache, held to the seven invariants.

The model is plain: requests own lists of blocks, blocks have reference counts, every written row
is a bytes object. Pools are so small that every step evicts. Blocks hold few tokens here, which
the cache can't see: it knows host slots only.
"""

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cache.harness import POISON, Cache, make_cache
from tests.kernels.cuda_emulator import COMPILER

from echokv.cache.ready import FREE_SHARE, PREFETCH_FREE_SHARE

LAYERS = 3
BLOCK = 4  # tokens
HOST_SLOTS = 128
TOPK = 5


@dataclass
class Sequence:
    """One request: its blocks, how many tokens it wants, how many are computed."""

    blocks: list[int]
    length: int
    computed: int = 0

    @property
    def host_slots(self) -> list[int]:
        """Address of every token, computed or not."""
        slots = [block * BLOCK + offset for block in self.blocks for offset in range(BLOCK)]
        return slots[: self.length]


@dataclass
class Counts:
    """What one layer's counters must say."""

    selected: int = 0
    recalled: int = 0
    evicted: int = 0
    prefetched: int = 0
    useful: int = 0


@dataclass
class Row:
    """One token of a forward pass; `slot` is -1 for padding."""

    slot: int
    visible: list[int] = field(default_factory=list)  # host slots it may attend to


class CacheLife(RuleBasedStateMachine):
    """Admit, prefill, decode, finish, abort and preempt, in any order."""

    backend = "reference-cpu"
    any_among_equals = False  # whether ties may leave in any order; else by device slot

    @initialize(device_slots=st.sampled_from([TOPK, TOPK + 1, 13, 24, 40]), seed=st.integers(0, 99))
    def create(self, device_slots: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        self.cache: Cache = make_cache(
            self.backend, layers=LAYERS, device_slots=device_slots, host_slots=HOST_SLOTS
        )
        self.manager = self.cache.manager
        self.requests: list[Sequence] = []
        self.holders = [0] * (HOST_SLOTS // BLOCK)
        self.counts = [Counts() for _ in range(LAYERS)]
        self.ahead: set[int] = set()  # prefetched in this layer, until it is attended
        self.new: set[int] = set()  # appended with the selection that comes next

    # Requests.

    @rule(length=st.integers(1, 30))
    def admit(self, length: int) -> None:
        blocks = [block for block, holders in enumerate(self.holders) if holders == 0]
        needed = -(-length // BLOCK)
        if needed <= len(blocks):
            self._add(Sequence(self.rng.sample(blocks, needed), length))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0), length=st.integers(1, 30))
    def admit_with_shared_prefix(self, which: int, length: int) -> None:
        """Whole computed blocks of another request are taken over, not computed again."""
        donor = self.requests[which % len(self.requests)]
        shared = donor.blocks[: min(donor.computed, length - 1) // BLOCK]
        blocks = [block for block, holders in enumerate(self.holders) if holders == 0]
        needed = -(-length // BLOCK) - len(shared)
        if needed <= len(blocks):
            fresh = self.rng.sample(blocks, needed)
            self._add(Sequence([*shared, *fresh], length, computed=len(shared) * BLOCK))

    def _add(self, request: Sequence) -> None:
        self.requests.append(request)
        for block in request.blocks:
            self.holders[block] += 1

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0))
    def finish_or_abort(self, which: int) -> None:
        self._let_go(self.requests.pop(which % len(self.requests)).blocks)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0))
    def preempt(self, which: int) -> None:
        """Everything goes; the request comes back later from its first token."""
        request = self.requests.pop(which % len(self.requests))
        self._let_go(request.blocks)
        self.admit(request.length)

    def _let_go(self, blocks: list[int]) -> None:
        stale = []
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                stale += [block * BLOCK + offset for offset in range(BLOCK)]
        self.cache.release(stale)
        for layer in range(LAYERS):  # invariant 5
            assert not self.cache.resident(layer).keys() & set(stale)

    # Forward passes.

    @precondition(lambda self: any(one.computed < one.length for one in self.requests))
    @rule(which=st.integers(0), count=st.integers(1, 12))
    def prefill(self, which: int, count: int) -> None:
        """A chunk of one request's prompt."""
        waiting = [one for one in self.requests if one.computed < one.length]
        request = waiting[which % len(waiting)]
        chunk = range(request.computed, min(request.computed + count, request.length))
        slots = request.host_slots
        self._forward([Row(slots[token], slots[: token + 1]) for token in chunk])
        request.computed = chunk.stop

    @precondition(lambda self: any(one.computed == one.length for one in self.requests))
    @rule(padding=st.integers(0, 2), ahead=st.sampled_from([0, 0, 1, 3, 100]))
    def decode(self, padding: int, ahead: int) -> None:
        """One token of every request that is past its prompt, and some padding rows.

        Up to `ahead` rows a request are prefetched, as many as the pool surely has room for.
        """
        rows = []
        for request in self.requests:
            if request.computed == request.length and self._grow(request):
                slots = request.host_slots
                rows.append(Row(slots[-1], slots))
                request.computed = request.length
        if rows:
            self._forward(rows + [Row(-1)] * padding, ahead)

    def _grow(self, request: Sequence) -> bool:
        """Room for one more token, in a new block when the last one is full."""
        if request.length % BLOCK == 0:
            blocks = [block for block, holders in enumerate(self.holders) if holders == 0]
            if not blocks:
                return False
            request.blocks.append(self.rng.choice(blocks))
            self.holders[request.blocks[-1]] += 1
        request.length += 1
        return True

    def _forward(self, rows: list[Row], ahead: int = 0) -> None:
        """One pass: one cache step if it surely fits, else a step for each piece of rows."""
        capacity = self.manager.capacity
        at_once = len(rows) * (TOPK + 1) <= capacity
        size = len(rows) if at_once else capacity // TOPK
        bounded = at_once and not ahead and self.rng.random() < 0.8
        self._begin_step(len(rows) * (TOPK + 1) if bounded else None, prefetches=ahead > 0)
        put_off = self.any_among_equals and at_once and not ahead and self.rng.random() < 0.5
        for layer in range(LAYERS):
            kept = self._append(layer, [row.slot for row in rows], put_off=put_off)
            room = (capacity - len(rows) * (TOPK + 1)) // len(rows)
            if ahead and room > 0:
                kept |= self._prefetch(layer, rows, min(ahead, room), kept)
            for start in range(0, len(rows), size):
                if not at_once:
                    self._begin_step(None)
                    kept = set()
                self._attend(layer, rows[start : start + size], kept)
        self.manager.end_step()

    def _begin_step(self, most_rows: int | None, *, prefetches: bool = False) -> None:
        """Some rows may leave, so that their slots are free: the oldest, with ready lists."""
        before = [self._snapshot(layer) for layer in range(LAYERS)]
        self.manager.begin_step(most_rows=most_rows, prefetches=prefetches)
        share = PREFETCH_FREE_SHARE if prefetches else FREE_SHARE
        for layer, rows in enumerate(before):
            evicted = rows.keys() - self.cache.resident(layer).keys()
            most = self.manager.capacity // share if self.any_among_equals else 0
            assert len(evicted) <= most
            self._check_order(rows, evicted, set())
            self.counts[layer].evicted += len(evicted)

    def _append(self, layer: int, slots: list[int], *, put_off: bool) -> set[int]:
        """Returns the host slots that are protected now."""
        if put_off:
            self.cache.append(layer, slots, until_selected=True)
            self.new = {slot for slot in slots if slot >= 0}
            return set()
        keep = min(len(slots), self.manager.capacity)
        kept = {slot for slot in slots[len(slots) - keep :] if slot >= 0}
        before = self._snapshot(layer)
        self.cache.append(layer, slots, keep)
        self._check_eviction(layer, before, kept)
        return kept

    def _prefetch(self, layer: int, rows: list[Row], most: int, kept: set[int]) -> set[int]:
        """Any rows of the contexts, resident or not, some of them several times."""
        names = [
            [self.rng.choice([-1, *row.visible, *row.visible]) for _ in range(most)] for row in rows
        ]
        wanted = {slot for row in names for slot in row if slot >= 0}
        before = self._snapshot(layer)
        self.manager.prefetch(layer, self.cache.slots(names))
        self.ahead = wanted - before.keys()
        self._check_eviction(layer, before, kept | self.ahead)
        self.counts[layer].prefetched += len(self.ahead)
        return self.ahead

    def _attend(self, layer: int, rows: list[Row], kept: set[int]) -> None:
        wanted, scores = [], []
        for row in rows:
            chosen = self.rng.sample(row.visible, min(TOPK, len(row.visible)))
            wanted.append(chosen + [-1] * (TOPK - len(chosen)))
            padding = [-torch.inf] * (TOPK - len(chosen))
            scores.append([self.rng.gauss(0, 1) for _ in chosen] + padding)
        before = self._snapshot(layer)
        # `fetch` compares every row named with the truth: the set attended is the set asked for.
        found = self.cache.fetch(layer, wanted, torch.tensor(scores, device=self.cache.device))
        distinct = {slot for row in wanted for slot in row if slot >= 0}
        self._check_eviction(layer, before, kept | self.new | distinct)
        after = self.cache.resident(layer)
        assert found == [[after.get(slot, -1) for slot in row] for row in wanted]
        self.counts[layer].selected += len(distinct)
        recalled = distinct - before.keys() - self.new
        self.counts[layer].recalled += len(recalled)  # invariant 7: each once
        self.counts[layer].useful += len(distinct & self.ahead)
        self.ahead, self.new = set(), set()

    def _snapshot(self, layer: int) -> dict[int, tuple[int, int]]:
        """Host slot -> (priority, device slot)."""
        priority = self.manager.state.priority[layer].tolist()
        return {owner: (priority[slot], slot) for owner, slot in self.cache.resident(layer).items()}

    def _check_eviction(
        self, layer: int, before: dict[int, tuple[int, int]], protected: set[int]
    ) -> None:
        """Only as many go as must, the lowest priorities first, never a protected row."""
        after = self.cache.resident(layer)
        assert protected <= after.keys()  # invariant 4
        evicted = before.keys() - after.keys()
        room = self.manager.capacity - len(before)
        assert len(evicted) == max(0, len(protected - before.keys()) - room)
        self._check_order(before, evicted, protected)
        self.counts[layer].evicted += len(evicted)

    def _check_order(
        self, before: dict[int, tuple[int, int]], evicted: set[int], protected: set[int]
    ) -> None:
        """Nobody who wasn't protected has stayed with a lower priority than who has gone."""
        stayed = {before[slot] for slot in before.keys() - protected - evicted}
        gone = {before[slot] for slot in evicted}
        if self.any_among_equals:
            gone, stayed = ({(level, 0) for level, _ in some} for some in (gone, stayed))
            gone -= {max(gone, default=None)} & {min(stayed, default=None)}
        assert not gone or not stayed or max(gone) < min(stayed)

    # What holds after every step.

    @invariant()
    def sound(self) -> None:
        """Invariants 1 to 3, no resident row of a slot that nobody holds, exact counters."""
        if not hasattr(self, "cache"):
            return
        held = torch.tensor(self.holders).repeat_interleave(BLOCK) > 0
        self.manager.check(held)
        assert self.manager.live_rows(held) == max(
            len(self.cache.resident(layer)) for layer in range(LAYERS)
        )
        for layer, counts in enumerate(self.manager.counters()):
            want = self.counts[layer]
            assert (counts.selected, counts.recalled) == (want.selected, want.recalled)
            assert counts.evicted == want.evicted
            assert (counts.prefetched, counts.useful) == (want.prefetched, want.useful)

    @invariant()
    def host_pool_is_what_was_written(self) -> None:
        """Poison is where nothing was written, and nowhere else."""
        if not hasattr(self, "cache"):
            return
        written = torch.zeros(LAYERS, HOST_SLOTS, dtype=torch.bool)
        for place in self.cache.truth:
            written[place] = True
        poisoned = (self.cache.host_pool.rows == POISON).all(dim=2)  # no written row is like that
        assert torch.equal(poisoned, ~written)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()


class InterpretedCacheLife(CacheLife):
    """On Triton's interpreter, which is slow: few and short lives."""

    backend = "triton-interpreter"


class EmulatedCacheLife(CacheLife):
    """The fused recall, its kernels emulated on the CPU."""

    backend = "cuda-emulated"
    any_among_equals = True


class CudaCacheLife(CacheLife):
    """On the GPU."""

    backend = "triton-cuda"


class FusedCacheLife(CacheLife):
    """On a Hopper GPU, with the fused recall."""

    backend = "cuda-cuda"
    any_among_equals = True


_RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck)}

TestReferenceCache = CacheLife.TestCase
TestReferenceCache.settings = settings(max_examples=40, stateful_step_count=40, **_RELAXED)
TestInterpretedCache = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on CUDA here")(
    InterpretedCacheLife.TestCase
)
TestInterpretedCache.settings = settings(
    max_examples=6, stateful_step_count=12, derandomize=True, **_RELAXED
)
TestEmulatedCache = pytest.mark.skipif(COMPILER is None, reason="needs g++")(
    EmulatedCacheLife.TestCase
)
TestEmulatedCache.settings = settings(max_examples=10, stateful_step_count=16, **_RELAXED)
TestCudaCache = pytest.mark.gpu(CudaCacheLife.TestCase)
TestCudaCache.settings = settings(max_examples=60, stateful_step_count=40, **_RELAXED)
TestFusedCache = pytest.mark.gpu(
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    )(FusedCacheLife.TestCase)
)
TestFusedCache.settings = settings(max_examples=60, stateful_step_count=40, **_RELAXED)
