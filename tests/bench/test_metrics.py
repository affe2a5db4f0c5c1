"""Serving figures against values worked out by hand."""

import json
import math

import pytest

from echokv.bench.metrics import (
    RequestTiming,
    render_serving_result,
    request_details,
    serving_metrics,
)

# Sent at 10.0 and 10.2 on the client's clock; the third failed at once.
LONG = RequestTiming(
    start_s=10.0, latency_s=1.1, chunk_s=(0.5, 0.7, 1.1), prompt_len=4, output_len=3
)
SHORT = RequestTiming(start_s=10.2, latency_s=0.3, chunk_s=(0.3,), prompt_len=2, output_len=1)
FAILED = RequestTiming(start_s=10.3, error="HTTP 400: no")

BY_HAND = {
    "duration": 2.0,
    "completed": 2,
    "failed": 1,
    "total_input_tokens": 6,
    "total_output_tokens": 4,
    "request_throughput": 1.0,
    "output_throughput": 2.0,
    "total_token_throughput": 5.0,
    "max_output_tokens_per_s": 3.0,  # 10.5, 10.5 and 10.7; 11.1 is in the next second
    "max_concurrent_requests": 2,
    "mean_ttft_ms": 400.0,
    "median_ttft_ms": 400.0,
    "std_ttft_ms": 100.0,
    "p99_ttft_ms": 498.0,
    "mean_tpot_ms": 300.0,  # (1.1 - 0.5) / 2; a single token has none
    "median_tpot_ms": 300.0,
    "std_tpot_ms": 0.0,
    "p99_tpot_ms": 300.0,
    "mean_itl_ms": 300.0,  # 200 and 400
    "median_itl_ms": 300.0,
    "std_itl_ms": 100.0,
    "p99_itl_ms": 398.0,
    "mean_e2el_ms": 700.0,
    "median_e2el_ms": 700.0,
    "std_e2el_ms": 400.0,
    "p99_e2el_ms": 1092.0,
}


def test_figures_are_those_worked_out_by_hand() -> None:
    result = serving_metrics([LONG, FAILED, SHORT], 2.0)
    assert result == pytest.approx(BY_HAND)
    json.dumps(result)


def test_percentiles_are_the_ones_asked_for() -> None:
    result = serving_metrics([LONG, SHORT], 2.0, percentiles=(50, 99.9))
    assert result["p50_e2el_ms"] == pytest.approx(700.0)
    assert result["p99.9_e2el_ms"] == pytest.approx(300 + 0.999 * 800)
    assert "p99_e2el_ms" not in result


@pytest.mark.parametrize("timings", [[], [FAILED]])
def test_nothing_completed_gives_zeros(timings: list[RequestTiming]) -> None:
    result = serving_metrics(timings, 0.5)
    assert result["completed"] == 0
    assert all(value == 0 for key, value in result.items() if key.endswith("_ms"))
    assert result["max_concurrent_requests"] == 0


def test_a_request_that_ends_when_another_starts_does_not_overlap_it() -> None:
    first = RequestTiming(start_s=0.0, latency_s=1.0, chunk_s=(1.0,), output_len=1)
    second = RequestTiming(start_s=1.0, latency_s=1.0, chunk_s=(1.0,), output_len=1)
    assert serving_metrics([first, second], 2.0)["max_concurrent_requests"] == 1


def test_details_keep_the_order_of_the_requests() -> None:
    details = request_details([LONG, FAILED, SHORT])
    assert details["input_lens"] == [4, 0, 2]
    assert details["output_lens"] == [3, 0, 1]
    assert details["ttfts"] == [0.5, 0.0, 0.3]
    assert details["itls"] == [pytest.approx([0.2, 0.4]), [], []]
    assert details["start_times"] == [10.0, 10.3, 10.2]
    assert details["errors"] == ["", "HTTP 400: no", ""]


def test_the_printed_block() -> None:
    block = render_serving_result(BY_HAND, max_concurrency=8, request_rate=1.5)
    lines = [line.rstrip() for line in block.splitlines()]
    assert lines == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2",
        "Failed requests:                         1",
        "Maximum request concurrency:             8",
        "Request rate configured (RPS):           1.50",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      6",
        "Total generated tokens:                  4",
        "Request throughput (req/s):              1.00",
        "Output token throughput (tok/s):         2.00",
        "Peak output token throughput (tok/s):    3.00",
        "Peak concurrent requests:                2",
        "Total token throughput (tok/s):          5.00",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          400.00",
        "Median TTFT (ms):                        400.00",
        "P99 TTFT (ms):                           498.00",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          300.00",
        "Median TPOT (ms):                        300.00",
        "P99 TPOT (ms):                           300.00",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           300.00",
        "Median ITL (ms):                         300.00",
        "P99 ITL (ms):                            398.00",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          700.00",
        "Median E2EL (ms):                        700.00",
        "P99 E2EL (ms):                           1092.00",
        "==================================================",
    ]
    unlimited = render_serving_result(BY_HAND, request_rate=math.inf)
    assert "configured" not in unlimited
    assert "Maximum" not in unlimited
