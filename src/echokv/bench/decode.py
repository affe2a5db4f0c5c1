"""Decoding measured at full shapes: step times, throughput, hit rates, bytes of HBM.

Everything runs in the product's engine (`decode_engine`). Variants of one comparison take turns in
one run, so that a warm or a throttled GPU meets all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from echokv.bench.decode_engine import DecodeEngine, PoolSizes, synchronise
from echokv.bench.decode_replay import ReplaySelector
from echokv.bench.decode_step import DeviceStep
from echokv.engine.stats import EngineStats
from echokv.errors import EchoKVError

MAX_FILL_STEPS = 64
"""Most steps spent on filling the device pool before anything is timed."""


def name_of(sizes: PoolSizes) -> str:
    """What a variant is called in reports."""
    return "offloaded" if sizes.offload else "resident"


class StepTimer:
    """Steps one engine whose requests all decode, and keeps the times.

    Args:
        decode: with requests queued; they must outlast the measurement.

    Attributes:
        step_ms: of every timed step of the engine.
        device_ms: of every timed replay of a step alone.
        tokens: what each request decoded, by its id.
        steps: of the engine between `before` and `after`.
        before, after: counters around the timed steps.
    """

    def __init__(self, decode: DecodeEngine) -> None:
        self.decode = decode
        self.step_ms: list[float] = []
        self.device_ms: list[float] = []
        self.tokens: dict[str, list[int]] = {}
        self.steps = 0
        self.before = self.after = decode.engine.stats()
        self._device_step: DeviceStep | None = None

    def warm_up(self, fill_steps: int, steps: int) -> None:
        """Steps that aren't timed.

        Args:
            fill_steps: with replayed selections, steps that each bring only new rows.
            steps: ordinary steps after these.
        """
        selector = self.decode.selector
        for _ in range(fill_steps):
            self._step()
            if isinstance(selector, ReplaySelector):
                selector.offset.add_(selector.steps_to_renew)
        for _ in range(steps):
            self._step()
        self.before = self.decode.engine.stats()

    def measure(self, steps: int) -> None:
        """Time some steps of the engine, each by the wall clock, after one that isn't timed."""
        self.steps += steps + 1
        self._step()
        last = time.perf_counter()
        for _ in range(steps):
            self._step()
            now = time.perf_counter()
            self.step_ms.append((now - last) * 1e3)
            last = now
        self.after = self.decode.engine.stats()

    def measure_device(self, steps: int) -> None:
        """Time some replays of a step alone; on a GPU by events, so without the CPU."""
        self.device_ms += _time_each(self.device_step, steps, self.decode.loaded.device)

    @property
    def device_step(self) -> Callable[[], None]:
        """One replay of a step alone."""
        if self._device_step is None:
            self._device_step = DeviceStep(self.decode)
            self._device_step.run()
        return self._device_step.run

    def _step(self) -> None:
        for output in self.decode.engine.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finished:
                raise EchoKVError("a request ended while step times were taken")


def _time_each(run: Callable[[], None], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each call."""
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def measure_steps(
    engines: Sequence[DecodeEngine],
    context_lens: Sequence[int],
    *,
    steps: int,
    rounds: int,
    warmup_steps: int,
) -> list[StepTimer]:
    """Step times of one batch on each engine, in turns.

    Args:
        engines: to compare.
        context_lens: computed tokens of each request.
        steps: timed steps in each round.
        rounds: turns of each engine.
        warmup_steps: untimed steps before.
    """
    timers = [StepTimer(decode) for decode in engines]
    fill_steps = max(_fill_steps(decode) for decode in engines)
    for timer in timers:
        output_len = timer.decode.sizes.max_model_len - max(context_lens)
        timer.decode.add_requests(context_lens, output_len, "step")
        timer.warm_up(fill_steps, warmup_steps)
    for _ in range(rounds):
        for timer in timers:
            timer.measure(steps)
    for _ in range(rounds):
        for timer in timers:
            timer.measure_device(steps)
    return timers


def _fill_steps(decode: DecodeEngine) -> int:
    """Steps until every device slot was used, so that each row evicts one.

    Replayed selections are all new rows then; the real indexer's take as many steps, at least.
    """
    if not decode.sizes.offload:
        return 1
    step = decode.sizes.batch * decode.loaded.config.index_topk
    return min(2 + decode.sizes.device_tokens // step, MAX_FILL_STEPS)


def run_all(decode: DecodeEngine, context_lens: Sequence[int], output_len: int) -> dict[str, Any]:
    """Throughput with every request queued at once; admission goes by the pools' capacity.

    Args:
        decode: a fresh engine.
        context_lens: computed tokens of each request.
        output_len: tokens that each decodes.
    """
    engine, device = decode.engine, decode.loaded.device
    decode.add_requests(context_lens, output_len, "all")
    before = engine.stats()
    running: list[int] = []
    step_ms: list[float] = []
    synchronise(device)
    start = last = time.perf_counter()
    tokens = 0
    while engine.has_work:
        outputs = engine.step()
        tokens += sum(len(output.token_ids) for output in outputs)
        if outputs:  # the first call may only launch
            now = time.perf_counter()
            running.append(len(outputs))
            step_ms.append((now - last) * 1e3)
            last = now
    synchronise(device)
    elapsed = time.perf_counter() - start
    return {
        "elapsed_s": elapsed,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / elapsed,
        "steps": len(running),
        "most_running": max(running),
        "first_step_ms": step_ms[0],  # nothing is resident yet
        "median_step_ms": statistics.median(step_ms),
        **cache_figures(before, engine.stats()),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and spread of some times."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[len(ordered) * 9 // 10],
        "count": len(ordered),
    }


def cache_figures(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """Rows selected and recalled between two snapshots, a layer."""
    pairs = list(zip(before.layers, after.layers, strict=True))
    selected = [new.selected_rows - old.selected_rows for old, new in pairs]
    recalled = [new.recalled_rows - old.recalled_rows for old, new in pairs]
    return {
        "selected_rows_by_layer": selected,
        "recalled_rows_by_layer": recalled,
        "hit_rate_by_layer": [
            1.0 - missed / wanted if wanted else None
            for wanted, missed in zip(selected, recalled, strict=True)
        ],
    }
