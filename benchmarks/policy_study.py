"""Which eviction policies come near Belady's optimum on recorded traces.

    python benchmarks/policy_study.py TRACE... --out benchmarks/results/policy-study.json

Simulates policies that the product's interface could or could not express, over the same cache
steps as `echokv bench trace replay`; "product" and "belady" come from the replay itself. A
simulated policy gives every row a value when it is selected or written; the lowest value goes
first, rows of the running step never.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echokv.bench.report import write_json
from echokv.bench.trace_belady import Step, belady, cache_steps
from echokv.bench.trace_format import CODE_BINS, Ints, Trace, load_trace
from echokv.bench.trace_replay import POLICIES, ReplayResult, replay
from echokv.cli.bench_trace import fractions

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Touch:
    """What a policy knows when rows are selected: the step, their state, their score's place."""

    step: int
    value: Doubles  # before
    last_step: NDArray[np.int64]  # of the last touch
    place: Doubles  # of the score between the lowest and the highest of its row, in [0, 1]


@dataclass(frozen=True)
class Policy:
    """`touch` gives selected rows their new values; `decay` turns a value into today's."""

    touch: Callable[[Touch], Doubles]
    decay: Callable[[Doubles, NDArray[np.int64]], Doubles] = lambda value, age: value


def _decayed_count(rate: float) -> Policy:
    def decay(value: Doubles, age: NDArray[np.int64]) -> Doubles:
        return np.asarray(value * rate**age)

    return Policy(lambda t: decay(t.value, t.step - t.last_step) + 1.0, decay)


def _with_bonus(steps: float) -> Policy:
    return Policy(lambda t: t.step + steps * t.place)


STUDIED = {
    "recency alone": Policy(lambda t: np.full(t.place.shape, float(t.step))),
    "recency, reversed scores": Policy(lambda t: t.step + 0.9 * (1 - t.place)),
    "recency + 4 steps x score": _with_bonus(4),
    "recency + 16 steps x score": _with_bonus(16),
    "decayed count, 0.9": _decayed_count(0.9),
    "decayed count, 0.97": _decayed_count(0.97),
    "count": _decayed_count(1.0),
    "score alone": Policy(lambda t: t.place),
}


def simulate(trace: Trace, capacity: int, policy: Policy) -> ReplayResult:
    """Replay a trace through a simulated policy, layer by layer."""
    selected = np.zeros((len(trace.layers), trace.num_passes), np.int64)
    recalled = np.zeros_like(selected)
    for layer, steps in enumerate(cache_steps(trace, capacity)):
        state = _Layer(policy, capacity, trace.host_slots)
        for number, step in enumerate(steps):
            selected[layer, step.number] += step.selected.size
            recalled[layer, step.number] += state.advance(number, step)
    return ReplayResult(selected=selected, recalled=recalled, counters=[])


class _Layer:
    """One layer's device pool under a simulated policy."""

    def __init__(self, policy: Policy, capacity: int, host_slots: int) -> None:
        self._policy, self._capacity = policy, capacity
        self._resident = np.zeros(host_slots, np.bool_)
        self._value = np.zeros(host_slots)
        self._last = np.zeros(host_slots, np.int64)

    def advance(self, number: int, step: Step) -> int:
        """One step; returns how many rows it recalls."""
        resident = self._resident
        resident[step.released], self._value[step.released] = False, 0.0
        chosen = step.resident
        needed = np.union1d(step.written, chosen)
        missed = self._absent(np.setdiff1d(chosen, step.written, assume_unique=True))
        resident[needed] = False
        others = np.flatnonzero(resident)
        excess = others.size + needed.size - self._capacity
        if excess > 0:
            values = self._policy.decay(self._value[others], number - self._last[others])
            resident[others[np.argsort(values, kind="stable")[:excess]]] = False
        resident[needed] = True
        self._value[step.written] = np.maximum(self._value[step.written], number - 0.5)
        self._value[chosen] = self._policy.touch(
            Touch(number, self._value[chosen], self._last[chosen], step.codes / (CODE_BINS + 1))
        )
        self._last[needed] = number
        # What doesn't stay is copied out of what is resident then.
        return missed + self._absent(np.setdiff1d(step.selected, needed, assume_unique=True))

    def _absent(self, slots: Ints) -> int:
        return int(slots.size - self._resident[slots].sum())


def main() -> None:
    """Study every trace at every pool size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--pools", default="1/4,1/8", help="shares of the live tokens")
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args()
    studies = []
    for path in args.traces:
        trace = load_trace(path)
        for fraction in fractions(args.pools):
            rates = study(trace, fraction)
            studies.append({"trace": path.stem, "fraction": str(fraction), "hit_rates": rates})
            print(f"{path.stem}, pool {fraction} of {trace.live_tokens()} live tokens")
            for name, rate in rates.items():
                print(f"  {name:28} {100 * rate:.2f}%")
    if args.out:
        write_json(args.out, {"studies": studies})


def study(trace: Trace, fraction: Fraction) -> dict[str, float]:
    """Hit rate in decoding passes, by policy."""
    capacity, passes = max(trace.topk, int(trace.live_tokens() * fraction)), trace.decodes()
    rates = {
        name: replay(trace, capacity, make).hit_rate(passes) for name, make in POLICIES.items()
    }
    for name, policy in STUDIED.items():
        rates[name] = simulate(trace, capacity, policy).hit_rate(passes)
    rates["belady"] = belady(trace, capacity).hit_rate(passes)
    return rates


if __name__ == "__main__":
    main()
