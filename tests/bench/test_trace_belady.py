"""Belady's simulator against an exhaustive search, and against every policy."""

import itertools

import numpy as np
import pytest
from tests.bench.traces import made_up_trace

from echokv.bench.trace_belady import Step, belady, fewest_misses
from echokv.bench.trace_replay import POLICIES, replay
from echokv.errors import ConfigError

SLOTS = 7


def random_steps(rng: np.random.Generator, capacity: int) -> list[Step]:
    steps = []
    for number in range(8):
        fits = bool(rng.random() < 0.7)
        size = int(rng.integers(0, (capacity if fits else SLOTS) + 1))
        needed = rng.permutation(SLOTS)[:size].astype(np.int32)
        cut = int(rng.integers(0, min(size, capacity) + 1))
        selected = np.union1d(needed[cut:], needed[: cut // 2])  # some written rows are selected
        released = rng.permutation(SLOTS)[: int(rng.random() < 0.3)].astype(np.int32)
        selected = np.sort(selected).astype(np.int32)
        codes = np.zeros(selected.size, np.uint8)
        written = np.sort(needed[:cut])
        steps.append(Step(number, released, written, selected, selected, codes, fits))
    return steps


def exhaustive(steps: list[Step], capacity: int) -> int:
    """Fewest misses over every choice of what stays, by dynamic programming over resident sets."""
    costs = {frozenset[int](): 0}
    for step in steps:
        written, selected = set(step.written.tolist()), set(step.selected.tolist())
        needed, following = (
            written | (selected if step.fits else set()),
            dict[frozenset[int], int](),
        )
        for before, cost in costs.items():
            have = before - set(step.released.tolist())
            cost += len(selected - written - have)
            others = (have | selected) - needed
            for keep in range(min(len(others), capacity - len(needed)) + 1):
                for stay in itertools.combinations(sorted(others), keep):
                    after = frozenset(needed | set(stay))
                    following[after] = min(cost, following.get(after, cost))
        costs = following
    return min(costs.values())


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 7])
def test_no_choice_of_victims_does_better(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    for _ in range(25):
        steps = random_steps(rng, capacity)
        assert sum(fewest_misses(steps, capacity, SLOTS)) == exhaustive(steps, capacity)


@pytest.mark.parametrize("capacity", [8, 16, 27, 40, 200])
def test_every_policy_needs_at_least_as_many_recalls(capacity: int) -> None:
    trace = made_up_trace(capacity)
    best = belady(trace, capacity)
    for policy in POLICIES.values():
        result = replay(trace, capacity, policy)
        np.testing.assert_array_equal(result.selected, best.selected)
        assert (result.recalled.sum(1) >= best.recalled.sum(1)).all()
    if capacity == 200:  # everything fits: only first uses are missed
        np.testing.assert_array_equal(result.recalled, best.recalled)


def test_a_pool_below_topk_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 slots is below the trace's top-k of 8"):
        belady(made_up_trace(0), 7)
    with pytest.raises(ConfigError, match="7 slots is below the trace's top-k of 8"):
        replay(made_up_trace(0), 7, POLICIES["lru"])
