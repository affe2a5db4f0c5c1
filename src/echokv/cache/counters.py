"""What a cache has counted, put together layer by layer; synchronises."""

from torch import Tensor

from echokv.cache.protocol import LayerCounters
from echokv.cache.reserve import EVICTED, HITS, RECALLED


def layer_counters(
    totals: Tensor, staged: Tensor, ahead: Tensor, useful: Tensor, resident: Tensor
) -> list[LayerCounters]:
    """One for each of L layers.

    Args:
        totals: [L, TOTALS] int64, of appends and recalls.
        staged: [L, 2] int64, rows copied from the device pool and from host.
        ahead: [L, TOTALS] int64, of prefetches.
        useful: [L] int64, prefetched rows that were selected.
        resident: [L] int64, rows in the device pool.
    """
    rows = (one.tolist() for one in (totals, staged, ahead, useful, resident))
    return [
        LayerCounters(
            selected=row[HITS] + row[RECALLED] + sum(copied),  # hits and misses, each distinct
            recalled=row[RECALLED] + copied[1],
            evicted=row[EVICTED] + early[EVICTED],
            prefetched=early[RECALLED],
            useful=wanted,
            resident=count,
        )
        for row, copied, early, wanted, count in zip(*rows, strict=True)
    ]
