"""How well the last k-th scores predict the next one (ECHO paper, section 5.1, Figs 7 and 8).

The prediction for a sequence and layer is an exponential moving average: the first k-th score
predicts the second; then prediction = alpha * k-th score + (1 - alpha) * prediction. Only
decoding rows take part, consecutive ones of one sequence.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echokv.bench.trace_format import Floats, Trace

Doubles = NDArray[np.float64]


def threshold_figures(trace: Trace, alphas: list[float]) -> dict[str, Any]:
    """Prediction errors and candidate counts, ready for JSON.

    Args:
        trace: the recorded run.
        alphas: weights of the newest k-th score, in (0, 1].

    Returns:
        for each alpha, over all layers and by layer: `relative_error` (|prediction - k-th score|
        over |k-th score|), `candidates` (tokens that score at least the prediction, over k) and
        `covered` (share of the selected rows among them).
    """
    return {
        "num_decoded_rows": int(_decoding(trace).sum()),
        "kth_ranks": trace.meta["kth_ranks"],
        "by_alpha": [_figures_of(trace, alpha) for alpha in alphas],
    }


def _figures_of(trace: Trace, alpha: float) -> dict[str, Any]:
    by_layer = [_predictions(trace, layer, alpha) for layer in range(len(trace.layers))]
    return {
        "alpha": alpha,
        **_summary(*(np.concatenate(parts) for parts in zip(*by_layer, strict=True))),
        "layers": [_summary(*parts) for parts in by_layer],
    }


def _predictions(trace: Trace, layer: int, alpha: float) -> tuple[Doubles, Doubles]:
    """Relative errors, and candidates over k, of every prediction of one layer."""
    kth, ranks = trace.kth_scores[layer], trace.rank_scores[layer]
    errors, candidates = [], []
    for rows in _sequences(trace):
        predictions = ema(kth[rows].astype(np.float64), alpha)
        actual = kth[rows[1:]].astype(np.float64)
        errors.append(np.abs(predictions - actual) / np.maximum(np.abs(actual), 1e-30))
        candidates.append(
            count_above(ranks[rows[1:]], trace.meta["kth_ranks"], predictions) / trace.topk
        )
    empty = np.zeros(0)
    return np.concatenate([empty, *errors]), np.concatenate([empty, *candidates])


def ema(values: Doubles, alpha: float) -> Doubles:
    """Predictions of values[1:] from those before each."""
    predictions = np.empty(max(values.size - 1, 0))
    prediction = values[0] if values.size else 0.0
    for index in range(predictions.size):
        prediction = alpha * values[index] + (1 - alpha) * prediction
        predictions[index] = prediction
    return predictions


def count_above(rank_scores: Floats, ranks: list[int], thresholds: Doubles) -> Doubles:
    """Tokens scoring at least a threshold, from the scores at some ranks.

    Between two recorded ranks the count is interpolated along the score; above the first it is
    the first rank (too many, by less than k / 8), beyond the last it is the last (too few).

    Args:
        rank_scores: [n, G], descending; -inf past the context.
        ranks: G ranks, 1-based, ascending.
        thresholds: [n].
    """
    counts = np.empty(thresholds.size)
    for row, threshold in enumerate(thresholds):
        known = np.isfinite(rank_scores[row])
        scores, places = rank_scores[row][known][::-1], np.array(ranks)[known][::-1]
        counts[row] = np.interp(threshold, scores, places) if scores.size else 0
    return counts


def _decoding(trace: Trace) -> NDArray[np.bool_]:
    """[S]: selected rows that decode, have k tokens to choose from and whose ranks are known."""
    prompt_lens = trace.sequence_prompt_lens[trace.row_sequence]
    decodes = (trace.row_position >= prompt_lens)[trace.row_selected]
    known = ~np.isnan(trace.rank_scores[:, :, 0]).any(axis=0)
    full = np.isfinite(trace.kth_scores).all(axis=0)
    return np.asarray(decodes & known & full)


def _sequences(trace: Trace) -> list[NDArray[np.int64]]:
    """The decoding selected rows of each sequence, in order."""
    rows = np.flatnonzero(_decoding(trace))
    owners = trace.row_sequence[trace.row_selected][rows]
    return [rows[owners == owner] for owner in np.unique(owners)]


def _summary(errors: Doubles, candidates: Doubles) -> dict[str, Any]:
    return {
        "relative_error": _spread(errors),
        "candidates": _spread(candidates),
        "covered": float(np.minimum(candidates, 1).mean()) if candidates.size else None,
    }


def _spread(values: Doubles) -> dict[str, float] | None:
    if not values.size:
        return None
    p10, median, p90, p99 = np.percentile(values, (10, 50, 90, 99))
    mean = values.mean()
    return {
        name: float(value)
        for name, value in zip(
            ("mean", "p10", "median", "p90", "p99"), (mean, p10, median, p90, p99), strict=True
        )
    }
