"""Figures about a running engine: a consistent snapshot, taken between two steps.

Cumulative since start unless said otherwise; the server turns it into Prometheus metrics.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerCacheStats:
    """One layer's device pool. Rows are counted once a step however many requests select them."""

    selected_rows: int  # distinct rows wanted by attention
    recalled_rows: int  # of those, fetched from host because they were absent
    evicted_rows: int
    prefetched_useful_rows: int  # moved early and then selected
    prefetched_wasted_rows: int  # moved early for nothing
    resident_rows: int  # now

    @property
    def hit_rate(self) -> float:
        """Share of selected rows that were resident when attention asked; 1 before any."""
        return 1.0 - self.recalled_rows / self.selected_rows if self.selected_rows else 1.0


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of queues, pools and counters."""

    requests_running: int  # now
    requests_waiting: int  # now
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found
    host_pool_slots: int  # capacity
    host_pool_live_slots: int  # now, held by requests
    host_pool_cached_slots: int  # now, held by the prefix cache alone
    device_pool_slots: int  # capacity a layer
    device_pool_live_slots: int  # now, in the layer that has most: rows of live host slots
    layers: tuple[LayerCacheStats, ...]
