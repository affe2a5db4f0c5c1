"""The figures of a serving benchmark, from the times at which a client saw things happen.

Definitions, JSON keys and the printed block are those of vLLM's `bench serve`, so that results of
the two can be put side by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

_LATENCIES = (
    ("ttft", "Time to First Token", "TTFT"),
    ("tpot", "Time per Output Token (excl. 1st token)", "TPOT"),
    ("itl", "Inter-token Latency", "ITL"),
    ("e2el", "End-to-end Latency", "E2EL"),
)


@dataclass(frozen=True, kw_only=True)
class RequestTiming:
    """What the client saw of one request. Times are seconds; `start_s` is on the client's clock.

    A chunk is a server-sent event with output; a server may put several tokens in one.
    """

    start_s: float  # sent
    latency_s: float = 0.0  # sent to last chunk
    chunk_s: tuple[float, ...] = ()  # sent to each chunk
    prompt_len: int = 0  # tokens
    output_len: int = 0  # tokens
    error: str | None = None  # None: the request succeeded

    @property
    def ttft_s(self) -> float:
        """Sent to the first chunk."""
        return self.chunk_s[0]

    @property
    def itl_s(self) -> list[float]:
        """From each chunk to the next."""
        return [b - a for a, b in pairwise(self.chunk_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None when there is no such token."""
        if self.output_len < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)


def serving_metrics(
    timings: Sequence[RequestTiming], duration_s: float, *, percentiles: Sequence[float] = (99.0,)
) -> dict[str, Any]:
    """The result of a run: counts, throughputs and latencies, in vLLM's keys.

    Args:
        timings: one a request, failed ones included; only successful ones count in figures.
        duration_s: length of the run.
        percentiles: of each latency, reported as `p99_ttft_ms` and so on.

    Returns:
        Plain numbers and lists, ready for JSON. A latency that nothing was measured for is 0.
    """
    done = [timing for timing in timings if timing.error is None]
    total_input = sum(timing.prompt_len for timing in done)
    total_output = sum(timing.output_len for timing in done)
    samples = {
        "ttft": [timing.ttft_s for timing in done],
        "tpot": [timing.tpot_s for timing in done if timing.tpot_s is not None],
        "itl": [gap for timing in done for gap in timing.itl_s],
        "e2el": [timing.latency_s for timing in done],
    }
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": _peak_tokens_per_s(done),
        "max_concurrent_requests": _peak_concurrency(done),
    }
    for name, values in samples.items():
        result |= _summary(name, values, percentiles)
    return result


def request_details(timings: Sequence[RequestTiming]) -> dict[str, Any]:
    """Per-request lists in vLLM's keys, in the order of the requests; seconds."""
    ok = [timing.error is None for timing in timings]
    return {
        "input_lens": [timing.prompt_len for timing in timings],
        "output_lens": [timing.output_len for timing in timings],
        "ttfts": [timing.ttft_s if good else 0.0 for timing, good in zip(timings, ok, strict=True)],
        "itls": [timing.itl_s for timing in timings],
        "start_times": [timing.start_s for timing in timings],
        "errors": [timing.error or "" for timing in timings],
    }


def render_serving_result(
    result: dict[str, Any],
    *,
    percentiles: Sequence[float] = (99.0,),
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
) -> str:
    """The block that `bench serve` prints."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def line(label: str, value: float) -> None:
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{label:<40} {shown:<10}")

    line("Successful requests:", result["completed"])
    line("Failed requests:", result["failed"])
    if max_concurrency is not None:
        line("Maximum request concurrency:", max_concurrency)
    if math.isfinite(request_rate):
        line("Request rate configured (RPS):", float(request_rate))
    line("Benchmark duration (s):", float(result["duration"]))
    line("Total input tokens:", result["total_input_tokens"])
    line("Total generated tokens:", result["total_output_tokens"])
    line("Request throughput (req/s):", float(result["request_throughput"]))
    line("Output token throughput (tok/s):", float(result["output_throughput"]))
    line("Peak output token throughput (tok/s):", float(result["max_output_tokens_per_s"]))
    line("Peak concurrent requests:", result["max_concurrent_requests"])
    line("Total token throughput (tok/s):", float(result["total_token_throughput"]))
    for name, title, short in _LATENCIES:
        lines.append(f"{title:-^50}")
        line(f"Mean {short} (ms):", float(result[f"mean_{name}_ms"]))
        line(f"Median {short} (ms):", float(result[f"median_{name}_ms"]))
        for percentile in percentiles:
            label = f"p{percentile:g}"
            line(f"{label.upper()} {short} (ms):", float(result[f"{label}_{name}_ms"]))
    lines.append("=" * 50)
    return "\n".join(lines)


def _summary(name: str, seconds: list[float], percentiles: Sequence[float]) -> dict[str, float]:
    milliseconds = np.asarray(seconds or [0.0]) * 1000
    return {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
    } | {f"p{p:g}_{name}_ms": float(np.percentile(milliseconds, p)) for p in percentiles}


def _peak_tokens_per_s(done: Sequence[RequestTiming]) -> float:
    """Most chunks that arrived within one second, seconds counted from the first send."""
    if not done:
        return 0.0
    first = min(timing.start_s for timing in done)
    seconds = [int(timing.start_s + at - first) for timing in done for at in timing.chunk_s]
    return float(np.bincount(seconds).max())


def _peak_concurrency(done: Sequence[RequestTiming]) -> int:
    """Most requests in flight at one moment; one that ends when another starts isn't with it."""
    edges = [(timing.start_s, 1) for timing in done]
    edges += [(timing.start_s + timing.latency_s, -1) for timing in done]
    peak = current = 0
    for _, step in sorted(edges):
        current += step
        peak = max(peak, current)
    return peak
