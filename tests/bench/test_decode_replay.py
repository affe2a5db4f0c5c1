"""Replayed selections: valid in every step, and with the turnover that was promised."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.bench.traces import made_up_trace

from echokv.bench.decode_replay import SelectionSource, Turnover, hit_rates, turnover_rows
from echokv.bench.decode_trace import TraceReplay
from echokv.bench.trace_format import save_trace
from echokv.errors import ConfigError

CPU = torch.device("cpu")


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def selected(source: SelectionSource, step: int, contexts: list[int]) -> np.ndarray:
    """[L, T, k] of one step; request r is known by the number 10 + r."""
    count = len(contexts)
    owners = int32([10 + row for row in range(count)])
    return source.positions(int32([step] * count), int32(contexts), owners).numpy()


def assert_valid(positions: np.ndarray, contexts: list[int]) -> None:
    """Distinct, ascending, below the context, -1 at the end only."""
    assert positions.dtype == np.int32
    for layer in positions:
        for row, context in zip(layer, contexts, strict=True):
            chosen = row[row >= 0]
            assert (row[: chosen.size] == chosen).all()
            assert (np.diff(chosen) > 0).all()
            assert chosen.size == 0 or chosen[-1] < context


@pytest.mark.parametrize("topk", [64, 96])
def test_each_step_replaces_what_was_promised(topk: int) -> None:
    turnover = [0, 1, 5, topk // 3, topk]
    source = Turnover(turnover, topk, CPU)
    contexts = [2 * topk, 7 * topk + 5, 40 * topk]
    previous = selected(source, 1000, contexts)
    for step in range(1001, 1030):
        now = selected(source, step, contexts)
        assert_valid(now, contexts)
        for layer, rows in enumerate(turnover):
            for row in range(len(contexts)):
                kept = np.intersect1d(now[layer, row], previous[layer, row]).size
                assert kept == topk - rows
        previous = now


def test_a_row_that_left_stays_away_for_a_whole_context() -> None:
    topk, width, rows = 32, 6, 8
    source = Turnover([rows], topk, CPU)
    steps = [set(selected(source, step, [topk * width])[0, 0]) for step in range(60)]
    period = width * topk // rows
    assert steps[period] == steps[0]
    seen: set[int] = set()
    for before, now in pairwise(steps[: period + 1]):
        seen |= before - now
        assert len(before & now) == topk - rows
    assert seen == set(range(topk * width)), "every token had its turn"


@pytest.mark.parametrize("context", [0, 1, 63, 64, 65])
def test_contexts_around_k_select_what_there_is(context: int) -> None:
    positions = selected(Turnover([16], 64, CPU), 5, [context])
    assert_valid(positions, [context])
    assert (positions >= 0).sum() == min(context, 64)


def test_requests_and_layers_differ() -> None:
    positions = selected(Turnover([4, 4], 64, CPU), 9, [6400, 6400])
    assert not (positions[0, 0] == positions[1, 0]).all()
    assert not (positions[0, 0] == positions[0, 1]).all()


def test_hit_rates() -> None:
    assert hit_rates("0.98", 3) == [0.98] * 3
    paper = hit_rates("paper", 61)
    assert sorted(paper)[:2] == [0.88, 0.95]
    assert all(0.97 <= rate <= 0.99 + 1e-9 for rate in sorted(paper)[2:])
    assert turnover_rows([0.98, 1.0, 0.5], 2048) == [41, 0, 1024]
    for text in ("much", "1.5", "-1"):
        with pytest.raises(ConfigError, match="--hit-rate"):
            hit_rates(text, 3)
    with pytest.raises(ConfigError, match="turnover of 65 rows"):
        Turnover([65], 64, CPU)


def test_a_trace_is_walked_to_and_fro(tmp_path: Path) -> None:
    trace = made_up_trace(3, topk=8, steps=30, layers=2)
    path = tmp_path / "trace.npz"
    save_trace(trace, path)
    source = TraceReplay(path, 16, 3, CPU)
    contexts = [source.least_context] * 4
    recorded = [
        {
            tuple(np.concatenate([[2 * p, 2 * p + 1] for p in row[row >= 0]]).tolist())
            for row in layer
        }
        for layer in trace.positions
    ]
    steps = [selected(source, step, contexts) for step in range(120)]
    for positions in steps:
        assert_valid(positions, contexts)
        assert (positions[2] == positions[0]).all(), "layers are used in turn"
        for layer in range(2):
            for row in positions[layer]:
                assert tuple(row[row >= 0].tolist()) in recorded[layer]
    # Neighbouring steps are neighbours in the trace: much in common, also at the turns.
    for before, now in pairwise(steps):
        for row in range(len(contexts)):
            shared = np.intersect1d(before[0, row], now[0, row]).size
            assert shared >= 0.25 * (now[0, row] >= 0).sum()


def test_traces_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(made_up_trace(1, topk=8), path)
    with pytest.raises(ConfigError, match="selects 8 tokens, which does not divide the model's 20"):
        TraceReplay(path, 20, 2, CPU)
    lone = made_up_trace(1, topk=8, steps=1)
    save_trace(lone, path)
    with pytest.raises(ConfigError, match="two or more decoding steps"):
        TraceReplay(path, 8, 2, CPU)
