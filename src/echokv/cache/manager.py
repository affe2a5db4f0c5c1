"""The offloaded KV cache: every row in the host pool, a few a layer in HBM.

Knows the order of the ops and what protects what; the ops do the work. Device slots mean nothing
outside one cache step.
"""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from echokv.cache.append import Appender
from echokv.cache.checks import check_live, check_room, check_rows, live_slots, require_room
from echokv.cache.counters import layer_counters
from echokv.cache.policy import EvictionPolicy, RecencyThenScore
from echokv.cache.prefetched import PrefetchedRows
from echokv.cache.protocol import LayerCounters
from echokv.cache.ready import ReadyLists
from echokv.cache.reserve import HITS, RECALLED, Reserver
from echokv.cache.side_stream import SideStream
from echokv.cache.staged import StagedRows
from echokv.cache.state import CacheState
from echokv.kernels.fused_layer import TOTALS, FusedLayer, NewRows
from echokv.kernels.protocol import Kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import DeviceSlots, HostSlots


class CacheManager:
    """A `KVCache` whose rows live in host memory (sections 3 and 4 of the ECHO paper).

    Args:
        kernels: the backend.
        host_pool: where every row is.
        device_pool: where selected rows are.
        policy: eviction priorities; None: `RecencyThenScore`, the only one that a backend's fused
            recall knows.
    """

    def __init__(
        self,
        kernels: Kernels,
        host_pool: HostPool,
        device_pool: DevicePool,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self._kernels = kernels
        self._host_pool = host_pool
        self._device_pool = device_pool
        self._policy = policy or RecencyThenScore(kernels)
        layers, slots, _ = device_pool.rows.shape
        device = device_pool.rows.device
        self.state = CacheState.create(layers, slots, host_pool.num_slots, device)
        self._totals = torch.zeros((layers, TOTALS), dtype=torch.int64, device=device)
        self._ready: ReadyLists | None = None
        if kernels.fused is not None and policy is None:
            self._ready = ReadyLists(
                kernels.fused, self.state, host_pool, device_pool, self._totals
            )
        # Ready lists lie in the layers' slot buffers, which the op-by-op path leaves alone then.
        scratch = None if self._ready is None else self._ready.scratch
        self._slots = Reserver(kernels, self.state, scratch, self.state.workspace)
        # What the ops of one call count, laid out like a row of _totals so that one addition
        # takes it over; the columns of append stay at zero.
        self._selecting = torch.zeros(TOTALS, dtype=torch.int32, device=device)
        self.side = SideStream(device)
        """Where `prefetch` and `recall_ahead` run: whatever else touches the cache waits first."""
        self._ahead = SideStream(device)  # of fused prefetches: all but recalls waits for them
        self._prefetched = PrefetchedRows(kernels, self.state, self.side)
        self._staged = StagedRows(kernels, self.state, host_pool, device_pool)
        self._appender = Appender(
            kernels, self.state, host_pool, device_pool, self._ready, self._slots, self.side,
            self._totals,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Device slots a layer."""
        return self.state.device_slots

    @property
    def host_slots(self) -> int:
        """See `KVCache`."""
        return self.state.host_slots

    @property
    def recalls(self) -> bool:
        """See `KVCache`: what is absent comes from host."""
        return True

    @property
    def metadata_bytes(self) -> int:
        """See `KVCache`."""
        return self.state.metadata_bytes_per_layer * self.state.num_layers

    def begin_step(self, *, most_rows: int | None = None, prefetches: bool = False) -> None:
        """See `KVCache`."""
        self._wait()
        self._kernels.tick(self.state.clock, self.state.floor, self.state.priority)
        if self._ready is not None:
            self._ready.begin_step(most_rows, prefetches=prefetches)

    def end_step(self) -> None:
        """See `KVCache`."""
        self._wait()
        self.side.catch_up()

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
        """See `KVCache`."""
        require_room(f"keeping {keep} new rows", keep, self.capacity)
        self._ahead.join()
        self._appender.append(
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
        """See `KVCache`."""
        self._require_room_for(host_slots, max_distinct)
        self.side.join()
        self._appender.catch_up(but=layer)
        slots = self._make_resident(layer, host_slots, scores, self._appender.take())
        self._ahead.join()
        return slots

    def recall_ahead(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        max_distinct: int | None = None,
    ) -> DeviceSlots:
        """See `KVCache`."""
        self._require_room_for(host_slots, max_distinct)
        self._appender.catch_up(but=layer)
        new = self._appender.take()
        # What was put off counts prefetched rows that were selected: it must come after this.
        with self.side.fork(host_slots, scores, new, catches_up=False):
            return self._make_resident(layer, host_slots, scores, new, beside=True)

    def wait(self) -> None:
        """See `KVCache`."""
        self.side.join()
        self._ahead.join()

    def settle(self, layer: int) -> None:
        """See `KVCache`."""
        if layer == self.state.num_layers - 1:
            self.side.fork_put_off()

    def _wait(self) -> None:
        """Let the current stream wait for all others, and append what was put off."""
        self.wait()
        self._appender.catch_up()

    def _make_resident(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        new_rows: NewRows | None,
        *,
        beside: bool = False,
    ) -> DeviceSlots:
        if self._ready is not None:
            device_slots = self._ready.make_resident(
                layer, host_slots, scores, new_rows=new_rows, beside=beside
            )
            return DeviceSlots(device_slots)
        state, counts = self.state.layer(layer), self._selecting
        priorities = self._policy.priorities(self.state.clock, scores, host_slots).flatten()
        wanted = HostSlots(host_slots.flatten())
        hits = counts[HITS : HITS + 1]
        missing = self._slots.reserve(layer, wanted, priorities, counts, RECALLED, hits)
        self._totals[layer].add_(counts)
        self._recall(layer, missing, counts, self._slots)
        device_slots = torch.empty_like(wanted)
        self._kernels.translate(
            wanted, priorities, state.host_to_device, state.priority, device_slots
        )
        return DeviceSlots(device_slots.view(host_slots.shape))

    def stage(
        self, layer: int, host_slots: HostSlots, *, most_rows: int
    ) -> tuple[Tensor, DeviceSlots]:
        """See `KVCache`."""
        self._wait()
        return self._staged.stage(layer, host_slots, most_rows)

    def prefetch(self, layer: int, host_slots: HostSlots) -> None:
        """Fetch rows that the selection may want, before it is known; for the side stream.

        What is fetched is protected in this step, at its floor; what is resident already stays as
        it is. Together with the rows appended with `keep` and the rows to be selected in this step
        they must fit the device pool.

        Args:
            layer: decoder layer, whose `append` of this step has been called.
            host_slots: [T, m] int32, -1 for none; duplicates allowed.

        Raises:
            CapacityError: more entries than the device pool has slots.
        """
        entries = host_slots.numel()
        require_room(f"prefetching {entries} rows", entries, self.capacity)
        self.side.catch_up()
        self._list_anew(layer)
        mine, wanted = self._prefetched, HostSlots(host_slots.flatten())
        counts, priorities = mine.counts, mine.unranked[: wanted.shape[0]]
        missing = mine.slots.reserve(layer, wanted, priorities, counts, RECALLED, mine.num_hits)
        self._recall(layer, missing, counts, mine.slots)
        mine.note(layer, missing)

    def fork_ahead(self) -> AbstractContextManager[None]:
        """Where a fused prefetch of a layer runs: after its new rows, and beside its recall."""
        return self._ahead.fork(catches_up=False, after=self.side)

    def fused_layer(self, layer: int) -> FusedLayer | None:
        """A layer as a fused prefetch takes it; None where the backend has no ready lists."""
        if self._ready is None:
            return None
        return replace(self._ready.use(layer), totals=self._prefetched.totals[layer])

    def count_useful(self, layers: Tensor, host_slots: Tensor) -> None:
        """Say what fused prefetches have fetched in this step; at its end.

        Args:
            layers: [N] int32, decoder layers.
            host_slots: [N, M] int32, distinct within a row; negative for none.
        """
        self._prefetched.count_useful(layers, host_slots)

    def _recall(self, layer: int, missing: Tensor, counts: Tensor, slots: Reserver) -> None:
        """Copy to the device what `reserve` found absent."""
        self._kernels.recall(
            missing,
            counts[RECALLED : RECALLED + 1],
            slots.slot_buffer(layer),
            self._host_pool.rows[layer],
            self._device_pool.rows[layer],
        )

    def _require_room_for(self, host_slots: HostSlots, max_distinct: int | None) -> None:
        entries = host_slots.numel()
        distinct = entries if max_distinct is None else min(entries, max_distinct)
        require_room(f"a selection of {distinct} rows", distinct, self.capacity)

    def rows(self, layer: int) -> Tensor:
        """See `KVCache`."""
        return self._device_pool.rows[layer]

    def _list_anew(self, layer: int | None = None) -> None:
        """Ready lists don't see what other ops do to slots: the next step needs new ones."""
        if self._ready is not None:
            self._ready.forget(layer)

    def release(self, host_slots: Tensor) -> None:
        """See `KVCache`."""
        self._wait()
        self._list_anew()
        state = self.state
        device = state.priority.device
        slots = host_slots.to(device, torch.int32, non_blocking=True).contiguous()
        self._kernels.release(
            slots, state.device_free, state.priority, state.device_to_host, state.host_to_device
        )

    def counters(self) -> list[LayerCounters]:
        """See `KVCache`."""
        self.end_step()
        resident = (self.state.device_free == 0).sum(dim=1)
        ahead = self._prefetched
        return layer_counters(
            self._totals, self._staged.totals, ahead.totals, ahead.useful, resident
        )

    def live_rows(self, live_host_slots: Tensor) -> int:
        """See `KVCache`."""
        return int(live_slots(self.state, live_host_slots).sum(dim=1).max())

    def check(self, live_host_slots: Tensor | None = None) -> None:
        """See `KVCache`."""
        self.state.check()
        check_rows(self.state, self._host_pool.rows, self._device_pool.rows)
        check_room(self._totals + self._prefetched.totals, self.capacity)
        if live_host_slots is not None:
            check_live(self.state, live_host_slots)
