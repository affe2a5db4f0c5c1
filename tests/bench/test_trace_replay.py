"""Replaying a trace of a live engine gives that engine's own counters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.harness import host_pool_gib

from echokv.bench.trace_format import Trace, load_trace, save_trace
from echokv.bench.trace_record import TraceRecorder, record_trace
from echokv.bench.trace_replay import POLICIES, replay
from echokv.config import EngineConfig
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.stats import EngineStats

TOPK = 64


def run(
    model: Path, *, num_host_blocks: int, prompt_rows: int | None = None, **overrides: Any
) -> tuple[Trace, EngineStats]:
    """Five requests with a shared prefix, one aborted and one late."""
    recorder = TraceRecorder(prompt_rows=prompt_rows)
    config = EngineConfig(
        model=str(model),
        host_pool_gib=host_pool_gib(model, num_host_blocks),
        max_model_len=512,
        max_num_seqs=6,
        max_num_batched_tokens=96,
        prefetch="off",  # a replay follows the policy alone
        **overrides,
    )
    engine = Engine(config, hooks=recorder.hooks)
    recorder.attach(engine)
    rng = np.random.default_rng(4)
    shared = rng.integers(0, 256, 130).tolist()
    prompts = [shared + rng.integers(0, 256, n).tolist() for n in (5, 60, 90)]
    prompts += [rng.integers(0, 256, n).tolist() for n in (40, 150)]
    for index, prompt in enumerate(prompts[:4]):
        params = SamplingParams(temperature=1, seed=index, max_tokens=60, ignore_eos=True)
        engine.add_request(f"r{index}", prompt, params)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps == 12:
            engine.abort("r1")
            params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
            engine.add_request("late", prompts[4], params)
    stats = engine.stats()
    engine.close()
    return recorder.trace({}), stats


@pytest.mark.parametrize(
    ("device_pool_tokens", "num_host_blocks", "prefix_caching", "preempts"),
    [
        (7 * TOPK, 24, True, False),
        (7 * TOPK, 24, False, False),
        (7 * TOPK, 8, True, True),
        (4 * TOPK, 24, False, False),  # fewer run at a time, and prompts in more pieces
    ],
)
def test_a_replay_has_the_counters_of_the_live_run(
    small_model: Path,
    tmp_path: Path,
    device_pool_tokens: int,
    num_host_blocks: int,
    prefix_caching: bool,
    preempts: bool,
) -> None:
    trace, stats = run(
        small_model,
        num_host_blocks=num_host_blocks,
        device_pool_tokens=device_pool_tokens,
        enable_prefix_caching=prefix_caching,
    )
    assert (stats.preemptions > 0) == preempts
    assert (stats.prefix_cache_hits > 0) == prefix_caching
    save_trace(trace, tmp_path / "trace.npz")
    result = replay(load_trace(tmp_path / "trace.npz"), device_pool_tokens, POLICIES["product"])
    for mine, live in zip(result.counters, stats.layers, strict=True):
        assert mine.selected == live.selected_rows
        assert mine.recalled == live.recalled_rows
        assert mine.evicted == live.evicted_rows
        # What was released after the last pass is no part of the trace.
        assert mine.resident >= live.resident_rows
    assert result.selected.sum(1).tolist() == [count.selected for count in result.counters]
    assert result.recalled.sum(1).tolist() == [count.recalled for count in result.counters]
    assert len(trace.sequence_prompt_lens) == 5 + stats.preemptions


@pytest.mark.parametrize("prompt_rows", [0, 20])
def test_fewer_prompt_rows_keep_writes_and_the_later_selections(
    small_model: Path, prompt_rows: int
) -> None:
    whole, _ = run(small_model, num_host_blocks=24, device_pool_tokens=7 * TOPK)
    part, _ = run(
        small_model, num_host_blocks=24, device_pool_tokens=7 * TOPK, prompt_rows=prompt_rows
    )
    np.testing.assert_array_equal(whole.row_position, part.row_position)
    np.testing.assert_array_equal(whole.decodes(), part.decodes())
    starts = whole.sequence_prompt_lens[whole.row_sequence] - prompt_rows
    kept = whole.row_position >= starts
    np.testing.assert_array_equal(part.row_selected, kept)
    np.testing.assert_array_equal(part.positions, whole.positions[:, kept])
    assert replay(part, 5 * TOPK, POLICIES["product"]).hit_rate(part.decodes()) < 1


def test_recorded_ranks_hold_the_kth_score(small_model: Path) -> None:
    config = EngineConfig(
        model=str(small_model),
        max_model_len=512,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        device_pool_tokens=512,
    )
    jobs = [(list(range(200)), SamplingParams(max_tokens=6, ignore_eos=True, temperature=0))] * 2
    trace = record_trace(config, jobs, prompt_rows=0, about={"note": "x"})
    assert trace.meta["note"] == "x"
    ranks = trace.meta["kth_ranks"]
    assert ranks[0] == 8 and ranks[-1] == 4 * TOPK and TOPK in ranks
    np.testing.assert_array_equal(trace.rank_scores[:, :, ranks.index(TOPK)], trace.kth_scores)
    assert (np.diff(trace.rank_scores[:, :, : ranks.index(181)], axis=2) <= 0).all()
    beyond = [place for place, rank in enumerate(ranks) if rank > 206]
    assert np.isneginf(trace.rank_scores[:, :, beyond]).all()
