"""The sample trace of the trained demo model: the policy's distance from Belady's optimum.

Four requests of 4,096 tokens (kv_uuid, multi_needle, kv_names, variables) and 96 tokens of output
each, recorded together with `echokv bench trace record --prompt-rows 64`; docs/quality.md has the
command.
"""

from pathlib import Path

import pytest

from echokv.bench.trace_belady import belady
from echokv.bench.trace_format import Trace, load_trace
from echokv.bench.trace_replay import POLICIES, replay
from echokv.bench.trace_report import turnover
from echokv.bench.trace_thresholds import threshold_figures

FILE = Path(__file__).parent.parent / "data" / "trace-demo-4k.npz"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(FILE)


def test_the_file_is_small() -> None:
    assert FILE.stat().st_size <= 5_000_000


def test_it_is_a_real_run(trace: Trace) -> None:
    assert (trace.topk, len(trace.layers), len(trace.sequence_prompt_lens)) == (256, 6, 4)
    assert trace.decodes().sum() >= 90
    assert trace.live_tokens() > 16_000
    rates = turnover(trace)
    assert all(rate is not None and 0.05 < rate < 0.9 for rate in rates)


def test_the_policy_is_within_5_points_of_belady_at_a_quarter(trace: Trace) -> None:
    slots, passes = trace.live_tokens() // 4, trace.decodes()
    best = belady(trace, slots).hit_rate(passes)
    product = replay(trace, slots, POLICIES["product"]).hit_rate(passes)
    assert best - 0.05 <= product <= best


def test_kth_scores_predict_each_other(trace: Trace) -> None:
    (figures,) = threshold_figures(trace, [0.5])["by_alpha"]
    assert figures["relative_error"]["median"] < 0.3
    assert 0.5 < figures["candidates"]["median"] < 2
    assert figures["covered"] > 0.6
