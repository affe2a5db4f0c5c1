"""Belady's MIN: the fewest recalls that any policy could need, told the future.

The same steps under the same rules as the product: rows selected or written in one cache step are
resident together, so nothing is bypassed; released rows are gone. Evicting, among the rows that
the step doesn't need, those whose next selection is farthest away is optimal then too (exchange
argument: keeping the one needed sooner never costs more). Where a pass doesn't fit, and the product
reads copies, any of its rows may stay: what is left then is a bound that no policy reaches below.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echokv.bench.trace_format import Codes, Ints, Trace
from echokv.bench.trace_replay import (
    PassRows,
    ReplayResult,
    fits,
    kept,
    passes,
    require_capacity,
    resident_rows,
)
from echokv.log import progress

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Step:
    """One cache step of one layer, as sets of host slots."""

    number: int  # of the pass
    released: Ints  # forgotten before it
    written: Ints  # made resident without a recall
    selected: Ints  # distinct, ascending
    resident: Ints  # those of them that become so
    codes: Codes  # of the scores of `resident`; the highest where several rows select a slot
    fits: bool  # whether what is selected must be resident


def belady(trace: Trace, capacity: int) -> ReplayResult:
    """Replay every layer with the best possible evictions.

    Args:
        trace: the recorded run.
        capacity: device slots a layer.

    Raises:
        ConfigError: a device pool of fewer than topk slots.
    """
    layers, steps = range(len(trace.layers)), cache_steps(trace, capacity)
    selected = np.zeros((len(layers), trace.num_passes), np.int64)
    recalled = np.zeros_like(selected)
    for layer in progress(layers, total=len(layers), what="Belady", unit="layer"):
        misses = fewest_misses(steps[layer], capacity, trace.host_slots)
        for step, missed in zip(steps[layer], misses, strict=True):
            selected[layer, step.number] += step.selected.size
            recalled[layer, step.number] += missed
    return ReplayResult(selected=selected, recalled=recalled, counters=[])


def cache_steps(trace: Trace, capacity: int) -> list[list[Step]]:
    """The cache steps of every layer at some pool size.

    Raises:
        ConfigError: a device pool of fewer than topk slots.
    """
    require_capacity(trace, capacity)
    steps: list[list[Step]] = [[] for _ in trace.layers]
    for number, one in enumerate(passes(trace)):
        for layer, mine in enumerate(steps):
            mine.append(_step(one, number, layer, capacity))
    return steps


def _step(one: PassRows, number: int, layer: int, capacity: int) -> Step:
    """One pass in one layer."""
    selected, codes = one.selected[layer], one.codes[layer]
    fit, rows = fits(one, capacity), resident_rows(one, capacity)
    stays, highest = _distinct(selected[rows], codes[rows])
    distinct = stays if fit else _distinct(selected, codes)[0]
    return Step(number, one.released, kept(one, capacity), distinct, stays, highest, fit)


def _distinct(selected: Ints, codes: Codes) -> tuple[Ints, Codes]:
    """The host slots that rows select, and the highest code of each."""
    found, places = np.unique(selected.ravel(), return_inverse=True)
    highest = np.zeros(found.size, np.uint8)
    np.maximum.at(highest, places, codes.ravel())
    return found[found >= 0], highest[found >= 0]


def fewest_misses(steps: list[Step], capacity: int, host_slots: int) -> list[int]:
    """Recalls of each step of one layer under MIN.

    Args:
        steps: in order; what must be resident in each fits the pool together.
        capacity: device slots.
        host_slots: every host slot is below this.
    """
    needed = [np.union1d(step.written, step.selected) for step in steps]
    following = _next_selections(steps, needed, host_slots)
    resident = np.zeros(host_slots, np.bool_)
    next_use = np.zeros(host_slots, np.int64)
    misses = []
    for step, slots, future in zip(steps, needed, following, strict=True):
        resident[step.released] = False
        absent = slots[~resident[slots]]
        misses.append(int(np.setdiff1d(absent, step.written, assume_unique=True).size))
        resident[slots] = True
        next_use[slots] = future
        excess = int(resident.sum()) - capacity
        if excess > 0:
            staying = slots if step.fits else step.written
            resident[staying] = False
            others = np.flatnonzero(resident)
            resident[staying] = True
            assert excess <= others.size, "the rows of one step exceed the device pool"
            farthest = np.argpartition(next_use[others], others.size - excess)[-excess:]
            resident[others[farthest]] = False
    return misses


def _next_selections(
    steps: list[Step], needed: list[Ints], host_slots: int
) -> list[NDArray[np.int64]]:
    """For each step's needed rows, the next step that selects them before they are released."""
    upcoming = np.full(host_slots, _NEVER, np.int64)
    following = []
    for number in range(len(steps) - 1, -1, -1):
        following.append(upcoming[needed[number]])
        upcoming[steps[number].selected] = number
        upcoming[steps[number].released] = _NEVER
    return following[::-1]
