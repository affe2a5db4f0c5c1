"""Sparse attention over a cache: in pieces or at once, against dense softmax in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from echokv.attention import sparse_mla
from echokv.attention.sparse_mla import SparseAttention
from echokv.cache.batch import ForwardBatch, fits_at_once
from echokv.cache.manager import CacheManager
from echokv.cache.protocol import KVCache
from echokv.cache.resident import ResidentCache
from echokv.errors import CapacityError
from echokv.indexer.indexer import Selection
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import RowFormat
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import DeviceSlots, HostSlots

CPU = torch.device("cpu")
KERNELS = load_kernels("reference", CPU)
FMT = RowFormat(name="float32", latent_dim=32, rope_dim=16)
LAYERS, HOST_SLOTS, HEADS, TOPK, SCALE = 2, 256, 3, 8, 0.3


class Recorder:
    """A KV cache that notes what is asked of it and passes it on."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.calls: list[tuple[str, int]] = []
        self.most_rows: int | None = None
        self.ahead = False  # whether a recall is on its way

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def host_slots(self) -> int:
        return self.cache.host_slots

    @property
    def recalls(self) -> bool:
        return self.cache.recalls

    def begin_step(self, *, most_rows: int | None = None, prefetches: bool = False) -> None:
        self.calls.append(("step", 0))
        self.most_rows = most_rows
        self.cache.begin_step(most_rows=most_rows, prefetches=prefetches)

    def settle(self, layer: int) -> None:
        assert not self.ahead, "what is selected isn't resident yet"
        self.cache.settle(layer)

    def end_step(self) -> None:
        self.cache.end_step()

    def append(
        self,
        layer: int,
        host_slots: HostSlots,
        rows: Tensor,
        *,
        keep: int,
        beside: bool = False,
        until_selected: bool = False,
    ) -> None:
        self.calls.append(("append", keep))
        self.cache.append(
            layer, host_slots, rows, keep=keep, beside=beside, until_selected=until_selected
        )

    def make_resident(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        max_distinct: int | None = None,
    ) -> DeviceSlots:
        self.calls.append(("resident", host_slots.shape[0]))
        return self.cache.make_resident(layer, host_slots, scores, max_distinct=max_distinct)

    def recall_ahead(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        max_distinct: int | None = None,
    ) -> DeviceSlots:
        self.calls.append(("ahead", host_slots.shape[0]))
        self.ahead = True
        return self.cache.recall_ahead(layer, host_slots, scores, max_distinct=max_distinct)

    def wait(self) -> None:
        self.ahead = False
        self.cache.wait()

    def stage(
        self, layer: int, host_slots: HostSlots, *, most_rows: int
    ) -> tuple[Tensor, DeviceSlots]:
        self.calls.append(("staged", host_slots.shape[0]))
        self.most_rows = most_rows
        rows, places = self.cache.stage(layer, host_slots, most_rows=most_rows)
        used = places[places >= 0]
        assert rows.shape == (most_rows, FMT.row_bytes) and sorted(set(used.tolist())) == list(
            range(len(host_slots[host_slots >= 0].unique()))
        )
        rows[len(used.unique()) :] = 0xFF
        return rows, places

    def rows(self, layer: int) -> Tensor:
        return self.cache.rows(layer)


def make_cache(pool: int | None) -> Recorder:
    device_pool = DevicePool(LAYERS, pool or HOST_SLOTS, FMT.row_bytes, CPU)
    device_pool.rows.fill_(0xFF)
    if pool is None:
        return Recorder(ResidentCache(KERNELS, device_pool))
    host_pool = HostPool(LAYERS, HOST_SLOTS, FMT.row_bytes, CPU)
    host_pool.rows.fill_(0xFF)
    return Recorder(CacheManager(KERNELS, host_pool, device_pool))


def batch_of(host_slots: Tensor, padding: int = 0, context_rows: int = HOST_SLOTS) -> ForwardBatch:
    real = host_slots.shape[0]
    zeros = torch.zeros(real + padding, dtype=torch.int32)
    return ForwardBatch(
        token_ids=zeros.long(),
        positions=zeros,
        context_lens=zeros,
        host_slots=HostSlots(torch.cat([host_slots, host_slots.new_full((padding,), -1)])),
        request_rows=zeros,
        request_slots=None,
        block_tables=zeros[:1, None],
        sampled_rows=zeros[:0].long(),
        max_context_len=HOST_SLOTS,
        num_context_rows=context_rows,
        num_real_tokens=real,
    )


class World:
    """A context of rows in the cache, and selections over it."""

    def __init__(
        self,
        pool: int | None,
        tokens: int,
        padding: int = 0,
        context_rows: int = HOST_SLOTS,
        *,
        ahead: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(9)
        self.cache = make_cache(pool)
        self.attention = SparseAttention(
            KERNELS, self.cache, FMT, SCALE, TOPK, rows_ahead=(lambda _: 3) if ahead else None
        )
        slots = torch.randperm(HOST_SLOTS, generator=self.generator)[:100].to(torch.int32)
        self.rows = self.noise(100, 48)  # row i lives in host slot slots[i]
        for at in range(0, 100, 10):
            self.store(slots[at : at + 10], self.rows[at : at + 10])
        self.cache.calls.clear()
        self.batch = batch_of(slots[100 - tokens :], padding, context_rows)
        self.attention.begin_pass(self.batch)
        self.query = self.noise(tokens + padding, HEADS, 48)
        self.picked = torch.full((tokens + padding, TOPK), -1)
        for row in range(tokens):
            count = TOPK if row % 3 else 1 + row % TOPK  # some rows have fewer than k
            order = torch.randperm(100, generator=self.generator)[:count]
            self.picked[row, :count] = order.sort().values
        self.selection = Selection(
            positions=self.picked.to(torch.int32),
            host_slots=HostSlots(torch.where(self.picked < 0, -1, slots[self.picked])),
            scores=self.noise(tokens + padding, TOPK).masked_fill(self.picked < 0, -torch.inf),
            kth_scores=torch.zeros(tokens + padding),
        )

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def store(self, slots: Tensor, rows: Tensor) -> None:
        self.attention.begin_pass(batch_of(slots))
        for layer in range(LAYERS):
            sign = 1 - 2 * layer
            latent, rope = (sign * rows).split([32, 16], 1)
            batch = batch_of(slots)
            self.attention.append(layer, latent.contiguous(), rope.contiguous(), batch)

    def attend(self, layer: int) -> Tensor:
        return self.attention.attend(layer, self.query, self.selection, self.batch)

    def expected(self, layer: int) -> Tensor:
        rows = (1 - 2 * layer) * self.rows.double()
        out = torch.zeros(self.query.shape[0], HEADS, 32, dtype=torch.float64)
        for row, picked in enumerate(self.picked):
            keys = rows[picked[picked >= 0]]
            if len(keys):
                weights = (self.query[row].double() @ keys.T * SCALE).softmax(-1)
                out[row] = weights @ keys[:, :32]
        return out


@pytest.mark.parametrize("pool", [None, TOPK, TOPK + 1, 3 * TOPK - 1, 56, 62, 63, 256])
@pytest.mark.parametrize(("tokens", "padding"), [(1, 0), (7, 0), (7, 25)])
def test_it_is_softmax_over_the_selected_rows(pool: int | None, tokens: int, padding: int) -> None:
    world = World(pool, tokens, padding)
    for layer in range(LAYERS):
        output = world.attend(layer)
        torch.testing.assert_close(output.double(), world.expected(layer), rtol=1e-5, atol=1e-5)
    if isinstance(world.cache.cache, CacheManager):
        world.cache.cache.check()


@pytest.mark.parametrize("pool", [TOPK, 20, 57, 63])
def test_copies_change_no_bit(pool: int) -> None:
    expected = World(None, 7, 25).attend(0)
    assert torch.equal(World(pool, 7, 25).attend(0), expected)


def test_a_pass_that_fits_is_one_step() -> None:
    world = World(7 * (TOPK + 1), 7, 25)
    assert world.cache.calls == [("step", 0)]
    world.attend(0)
    assert world.cache.calls == [("step", 0), ("resident", 7)]


def test_a_step_is_told_how_many_rows_it_may_take() -> None:
    assert World(256, 7, 25).cache.most_rows == 7 * (TOPK + 1)
    assert World(100, 30, 2, context_rows=100).cache.most_rows == 100
    assert World(256, 7, ahead=True).cache.most_rows == 7 * (TOPK + 1) + 3


def test_a_pass_of_many_entries_over_few_rows_is_one_step() -> None:
    world = World(100, 30, 2, context_rows=100)  # 30 x k entries, but only 100 rows exist
    assert torch.equal(world.attend(0), World(None, 30, 2).attend(0))
    assert world.cache.calls == [("step", 0), ("resident", 30)]
    world.cache.cache.check()


def test_a_pass_that_does_not_fit_leaves_the_pool_alone() -> None:
    world = World(7 * (TOPK + 1) - 1, 7, 25)
    manager = world.cache.cache
    assert isinstance(manager, CacheManager)
    before = manager.state.device_to_host.clone()
    world.attend(0)
    assert world.cache.calls[1:] == [("staged", 7)]
    assert torch.equal(manager.state.device_to_host, before)
    manager.check()


def test_copies_take_no_more_than_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = World(None, 7, 25).attend(0)
    monkeypatch.setattr(sparse_mla, "MAX_STAGED_BYTES", (3 * TOPK - 1) * FMT.row_bytes)
    world = World(3 * TOPK - 1, 7, 25)
    assert torch.equal(world.attend(0), expected)
    assert world.cache.calls[1:] == [("staged", 4), ("staged", 3)]
    assert world.cache.most_rows == len(world.picked[4:].unique()) - 1  # one is -1


def test_rows_are_counted_where_they_were_found() -> None:
    world = World(20, 7)
    manager = world.cache.cache
    assert isinstance(manager, CacheManager)
    before = manager.counters()[1]
    chosen = world.selection.host_slots
    slots = chosen[chosen >= 0].unique()
    resident = int((manager.state.host_to_device[1][slots.long()] >= 0).sum())
    assert 0 < resident < len(slots)
    world.attend(1)
    after = manager.counters()[1]
    assert after.selected - before.selected == len(slots)
    assert after.recalled - before.recalled == len(slots) - resident
    assert after.evicted == before.evicted


@pytest.mark.parametrize("pool", [7 * (TOPK + 1), 256])
def test_a_decode_step_recalls_beside_its_query(pool: int) -> None:
    world = World(pool, 7)
    world.batch = replace(world.batch, request_slots=torch.arange(7, dtype=torch.int32))
    for layer in range(LAYERS):
        world.attention.begin_recall(layer, world.selection, world.batch)
        assert torch.equal(world.attend(layer), World(None, 7).attend(layer))
    assert [name for name, _ in world.cache.calls] == ["step", "ahead", "ahead"]
    world.cache.cache.check()


@pytest.mark.parametrize(
    ("pool", "decode"), [(None, True), (7 * (TOPK + 1) - 1, True), (256, False)]
)
def test_nothing_is_recalled_beside_where_it_would_not_do(pool: int | None, decode: bool) -> None:
    """Everything resident, a pass that doesn't fit, a prefill."""
    world = World(pool, 7)
    slots = torch.arange(7, dtype=torch.int32) if decode else None
    world.batch = replace(world.batch, request_slots=slots)
    world.attention.begin_recall(0, world.selection, world.batch)
    assert torch.equal(world.attend(0), World(None, 7).attend(0))
    assert "ahead" not in {name for name, _ in world.cache.calls}


def test_new_rows_are_kept_as_far_as_the_pool_goes() -> None:
    cache = make_cache(TOPK)
    attention = SparseAttention(KERNELS, cache, FMT, SCALE, TOPK)
    for count in (3, 20):
        batch = batch_of(torch.arange(count, dtype=torch.int32), padding=5)
        attention.append(0, torch.ones(count + 5, 32), torch.ones(count + 5, 16), batch)
    assert cache.calls == [("append", 3), ("append", TOPK)]


@pytest.mark.parametrize("tokens", [1, 7, 32])
@pytest.mark.parametrize("capacity", [8, 9, 71, 500])
def test_a_pass_fits_when_what_it_may_select_does(tokens: int, capacity: int) -> None:
    assert fits_at_once(tokens, 8, 10**9, capacity) == (tokens * 8 + tokens <= capacity)
    assert fits_at_once(tokens, 8, capacity, capacity)
    assert not fits_at_once(100, 8, capacity + 1, capacity)


def test_a_pool_below_k_is_refused() -> None:
    with pytest.raises(CapacityError, match=f"{TOPK - 1} is below index_topk {TOPK}"):
        SparseAttention(KERNELS, make_cache(TOPK - 1), FMT, SCALE, TOPK)
