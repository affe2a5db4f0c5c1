"""Offline throughput: every request queued at once, an engine stepped until all are done."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from echokv.bench.workload import BenchRequest
from echokv.engine.offline import OfflineEngine, drive
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats
from echokv.errors import ConfigError

Clock = Callable[[], float]


def run_throughput(
    engine: OfflineEngine,
    requests: Sequence[BenchRequest],
    *,
    warmup: Sequence[BenchRequest] = (),
    temperature: float = 0.0,
    on_token: Callable[[int], None] = lambda _: None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Run a workload to its end and say how fast it went.

    Every output has exactly the length asked for: end-of-sequence is ignored.

    Args:
        engine: a fresh engine; its counters must be this benchmark's alone.
        requests: the workload, prompts as token ids.
        warmup: requests run before the clock starts (kernels compile on their first use).
        temperature: of every request; 0 is greedy.
        on_token: called with the number of tokens of each output, for a progress bar.
        clock: seconds; injectable for tests.

    Returns:
        vLLM's keys (elapsed_time, num_requests, total_num_tokens, requests_per_second,
        tokens_per_second) and ours, ready for JSON. Times are seconds.

    Raises:
        RequestError: a request that the engine can't run.
    """
    for _ in drive(engine, [_job(request, temperature) for request in warmup], name="warmup"):
        pass
    before = engine.stats()
    first_token_s: dict[int, float] = {}
    num_output = 0
    start = clock()
    jobs = [_job(request, temperature) for request in requests]
    for index, output in drive(engine, jobs, name="bench"):
        first_token_s.setdefault(index, clock() - start)
        num_output += len(output.token_ids)
        on_token(len(output.token_ids))
    elapsed = clock() - start
    num_input = sum(len(request.prompt) for request in requests)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(requests) / elapsed,
        "tokens_per_second": (num_input + num_output) / elapsed,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "output_tokens_per_second": num_output / elapsed,
        "median_first_token_s": float(np.median(list(first_token_s.values()))),
        "cache": cache_figures(before, engine.stats()),
    }


def render_throughput(result: dict[str, Any]) -> str:
    """The lines that `bench throughput` prints."""
    cache = result["cache"]
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s,"
        f" {result['tokens_per_second']:.2f} total tokens/s,"
        f" {result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['total_input_tokens']}\n"
        f"Total num output tokens:  {result['total_output_tokens']}\n"
        f"Device pool hit rate:     {cache['hit_rate']:.2%}"
        f" ({cache['recalled_rows']} of {cache['selected_rows']} selected rows recalled)\n"
        f"Prefix cache hit rate:    {cache['prefix_cache_hit_rate']:.2%}\n"
        f"Preemptions:              {cache['preemptions']}"
    )


def cache_figures(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    """What the pools did between two snapshots.

    Rows are summed over layers; a rate whose denominator is 0 is 1 for rows, 0 for prefixes.
    """
    layers = list(zip(before.layers, after.layers, strict=True))
    selected = [new.selected_rows - old.selected_rows for old, new in layers]
    recalled = [new.recalled_rows - old.recalled_rows for old, new in layers]
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    return {
        "selected_rows": sum(selected),
        "recalled_rows": sum(recalled),
        "hit_rate": _hit_rate(sum(selected), sum(recalled)),
        "hit_rate_by_layer": [
            _hit_rate(wanted, missed) for wanted, missed in zip(selected, recalled, strict=True)
        ],
        "prefix_cache_hit_rate": hits / queries if queries else 0.0,
        "preemptions": after.preemptions - before.preemptions,
        "host_pool_slots": after.host_pool_slots,
        "device_pool_slots": after.device_pool_slots,
    }


def _hit_rate(selected: int, recalled: int) -> float:
    return 1.0 - recalled / selected if selected else 1.0


def _job(request: BenchRequest, temperature: float) -> tuple[tuple[int, ...], SamplingParams]:
    if isinstance(request.prompt, str):
        raise ConfigError("the offline benchmark takes token ids: encode text prompts first")
    params = SamplingParams(max_tokens=request.output_len, ignore_eos=True, temperature=temperature)
    return request.prompt, params
