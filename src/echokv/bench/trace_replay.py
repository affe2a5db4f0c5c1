"""Replays a trace through the product's cache manager and its ops, without a model.

Rows are a few bytes instead of a model's; everything that decides who stays is the product's own:
`CacheManager`, the reference kernels, the policy, and the cut of a pass into pieces.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from echokv.bench.trace_format import Ints, Trace, code_scores, selected_rows_by_pass
from echokv.cache.batch import fits_at_once
from echokv.cache.manager import CacheManager
from echokv.cache.policy import EvictionPolicy, RecencyThenScore
from echokv.cache.protocol import LayerCounters
from echokv.errors import ConfigError
from echokv.kernels.cache_args import SCORE_BITS
from echokv.kernels.protocol import Kernels
from echokv.kernels.registry import load_kernels
from echokv.log import progress
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import BLOCK_TOKENS, HostSlots

ROW_BYTES = 16


class Recency:
    """Plain LRU: every row of a step has the same priority; ties go to the lower device slot."""

    def priorities(
        self, clock: torch.Tensor, scores: torch.Tensor, host_slots: HostSlots
    ) -> torch.Tensor:
        """See `EvictionPolicy`."""
        return ((clock << SCORE_BITS) + 1).expand_as(host_slots).contiguous()


POLICIES: dict[str, Callable[[Kernels], EvictionPolicy]] = {
    "product": RecencyThenScore,
    "lru": lambda _: Recency(),
}
"""By the name that `--policies` and the results use."""


@dataclass(frozen=True)
class PassRows:
    """What one pass does in every layer."""

    released: Ints  # [n] host slots to forget before it
    context_rows: int  # most distinct rows that it can select or write
    written: Ints  # [T] host slots
    selected: Ints  # [L, t, k] host slots, -1 padded; t rows of the pass were recorded
    codes: NDArray[np.uint8]  # [L, t, k]
    num_requests: int
    last: NDArray[np.int64]  # those of the t rows that are their request's last in the pass


@dataclass(frozen=True)
class ReplayResult:
    """Rows of each layer and pass, each counted once a cache step."""

    selected: NDArray[np.int64]  # [L, P]
    recalled: NDArray[np.int64]  # [L, P]
    counters: list[LayerCounters]  # at the end, as the manager has them; empty for Belady

    def hit_rates(self, passes: NDArray[np.bool_]) -> list[float]:
        """Share of selected rows that were resident, by layer, over some passes."""
        return [
            _rate(selected, recalled)
            for selected, recalled in zip(
                self.selected[:, passes].sum(1), self.recalled[:, passes].sum(1), strict=True
            )
        ]

    def hit_rate(self, passes: NDArray[np.bool_]) -> float:
        """The same over all layers."""
        return _rate(self.selected[:, passes].sum(), self.recalled[:, passes].sum())


def _rate(selected: np.int64, recalled: np.int64) -> float:
    return 1.0 - float(recalled) / float(selected) if selected else 1.0


def passes(trace: Trace) -> Iterator[PassRows]:
    """The trace pass by pass, in host slots."""
    releases = np.searchsorted(trace.release_pass, np.arange(trace.num_passes + 1))
    offsets = np.arange(BLOCK_TOKENS, dtype=np.int32)
    owners = trace.row_sequence[trace.row_selected]
    for number, (rows, selected) in enumerate(selected_rows_by_pass(trace)):
        blocks = trace.release_block[releases[number] : releases[number + 1]]
        is_last = np.append(np.diff(trace.row_sequence[rows]) != 0, True)
        yield PassRows(
            context_rows=_context_rows(trace, rows),
            released=(blocks[:, None] * BLOCK_TOKENS + offsets).ravel().astype(np.int32),
            written=trace.slots(trace.row_sequence[rows], trace.row_position[rows]),
            selected=trace.slots(owners[selected][None, :, None], trace.positions[:, selected]),
            codes=trace.score_codes[:, selected],
            num_requests=int(is_last.sum()),
            last=np.flatnonzero(is_last[trace.row_selected[rows]]),
        )


def fits(one: PassRows, capacity: int) -> bool:
    """Whether a pass makes its selection resident; otherwise attention reads copies of its rows."""
    return fits_at_once(one.written.size, one.selected.shape[2], one.context_rows, capacity)


def kept(one: PassRows, capacity: int) -> Ints:
    """The written rows that stay; a pass that doesn't fit leaves room for its last tokens'."""
    topk = one.selected.shape[2]
    if not fits(one, capacity):
        capacity -= min(one.num_requests, capacity // topk) * topk
    return one.written[max(0, one.written.size - capacity) :]


def resident_rows(one: PassRows, capacity: int) -> slice | NDArray[np.int64]:
    """Those of a pass's t rows whose selection becomes resident."""
    if fits(one, capacity):
        return slice(None)
    return one.last[: capacity // one.selected.shape[2]]


def _context_rows(trace: Trace, rows: slice) -> int:
    """The sum of the contexts of a pass's sequences, as an engine without graphs bounds it."""
    contexts: dict[int, int] = {}
    for sequence, position in zip(
        trace.row_sequence[rows].tolist(), trace.row_position[rows].tolist(), strict=True
    ):
        contexts[sequence] = position + 1  # positions of a sequence ascend
    return sum(contexts.values())


def require_capacity(trace: Trace, capacity: int) -> None:
    """Raise ConfigError unless a device pool can hold one row's selection."""
    if capacity < trace.topk:
        raise ConfigError(
            f"a device pool of {capacity} slots is below the trace's top-k of {trace.topk}:"
            " attention of one token reads that many rows at once"
        )


def replay(
    trace: Trace, capacity: int, policy: Callable[[Kernels], EvictionPolicy]
) -> ReplayResult:
    """Drive a cache manager as the recorded run drove its own.

    Args:
        trace: the recorded run.
        capacity: device slots a layer.
        policy: makes the eviction policy.

    Raises:
        ConfigError: a device pool of fewer than topk slots.
    """
    require_capacity(trace, capacity)
    cpu = torch.device("cpu")
    kernels = load_kernels("reference", cpu)
    layers = len(trace.layers)
    host_pool = HostPool(layers, trace.host_slots, ROW_BYTES, cpu)
    device_pool = DevicePool(layers, capacity, ROW_BYTES, cpu)
    manager = CacheManager(kernels, host_pool, device_pool, policy(kernels))
    history = [manager.counters()]
    for one in progress(passes(trace), total=trace.num_passes, what="replaying", unit="pass"):
        _replay_pass(manager, one)
        history.append(manager.counters())
    manager.check()
    return ReplayResult(
        selected=_differences([[layer.selected for layer in counts] for counts in history]),
        recalled=_differences([[layer.recalled for layer in counts] for counts in history]),
        counters=history[-1],
    )


def _replay_pass(manager: CacheManager, one: PassRows) -> None:
    """One pass as `SparseAttention` would drive it."""
    if one.released.size:
        manager.release(torch.from_numpy(one.released))
    manager.begin_step()
    written = HostSlots(torch.from_numpy(one.written))
    rows = torch.zeros(written.shape[0], ROW_BYTES, dtype=torch.uint8)
    keep = kept(one, manager.capacity).size
    selected = torch.from_numpy(one.selected)
    scores = torch.from_numpy(code_scores(one.codes))
    for layer in range(selected.shape[0]):
        manager.append(layer, written, rows, keep=keep)
        if fits(one, manager.capacity):
            slots, most = HostSlots(selected[layer]), one.context_rows
            manager.make_resident(layer, slots, scores[layer], max_distinct=most)
        else:
            last = resident_rows(one, manager.capacity)
            manager.make_resident(layer, HostSlots(selected[layer, last]), scores[layer, last])
            manager.stage(layer, HostSlots(selected[layer]), most_rows=one.context_rows)


def _differences(history: list[list[int]]) -> NDArray[np.int64]:
    """[P + 1] lists of L running totals -> [L, P] increments."""
    totals = np.array(history, np.int64)
    return np.stack([after - before for before, after in pairwise(totals)], axis=1)
