"""Moving averages by hand, and candidate counts against a full sort."""

import numpy as np
import pytest
from tests.bench.traces import made_up_trace

from echokv.bench.trace_record import kth_ranks
from echokv.bench.trace_thresholds import count_above, ema, threshold_figures


def test_moving_averages_by_hand() -> None:
    values = np.array([4.0, 8.0, 2.0, 6.0])
    assert ema(values, 0.5).tolist() == [4.0, 6.0, 4.0]
    assert ema(values, 1.0).tolist() == [4.0, 8.0, 2.0]
    assert ema(values, 0.25).tolist() == [4.0, 5.0, 4.25]
    assert ema(values[:1], 0.5).size == 0 and ema(values[:0], 0.5).size == 0


def test_candidates_are_counted_to_within_a_rank_step() -> None:
    rng = np.random.default_rng(0)
    ranks = kth_ranks(64)
    scores = -np.sort(-rng.normal(size=(50, 400)), axis=1)
    recorded = scores[:, np.array(ranks) - 1].astype(np.float32)
    thresholds = scores[np.arange(50), rng.integers(0, 400, 50)]
    counts = count_above(recorded, ranks, thresholds)
    truth = (scores >= thresholds[:, None]).sum(1)
    truth = truth.clip(ranks[0], ranks[-1])
    np.testing.assert_allclose(counts, truth, rtol=2 ** (1 / 8) - 1)
    np.testing.assert_allclose(count_above(recorded, ranks, recorded[:, 10]), ranks[10])


def test_ranks_past_the_context_do_not_count() -> None:
    scores = np.array([[5.0, 3.0, -np.inf], [-np.inf] * 3], np.float32)
    assert count_above(scores, [1, 4, 8], np.array([-100.0, 0.0])).tolist() == [4, 0]


def test_a_constant_score_is_predicted_exactly() -> None:
    trace = made_up_trace(3)
    trace.kth_scores[:] = 2.0
    trace.rank_scores[:] = np.array([3.0, 2.0, 1.0], np.float32)
    figures = threshold_figures(trace, [0.3, 1.0])
    assert figures["num_decoded_rows"] == trace.positions.shape[1]
    for row in figures["by_alpha"]:
        assert row["relative_error"]["p99"] == pytest.approx(0, abs=1e-12)
        assert row["candidates"]["p10"] == row["candidates"]["p90"] == 1
        assert row["covered"] == 1


def test_rows_that_were_not_ranked_take_no_part() -> None:
    trace = made_up_trace(3)
    trace.rank_scores[:] = np.nan
    figures = threshold_figures(trace, [0.5])
    assert figures["num_decoded_rows"] == 0
    assert figures["by_alpha"][0]["covered"] is None
