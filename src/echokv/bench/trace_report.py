"""What a trace says: hit rates by pool and policy, predictions of the k-th score; text and PNG."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from echokv.bench.markdown import table
from echokv.bench.plots import figure, save_figure
from echokv.bench.trace_belady import belady
from echokv.bench.trace_format import Trace
from echokv.bench.trace_replay import POLICIES, ReplayResult, replay
from echokv.bench.trace_thresholds import threshold_figures

BELADY = "belady"
REPLAYS = (*POLICIES, BELADY)
"""Names of everything that a trace can be replayed through."""


def replay_figures(
    trace: Trace, fractions: Sequence[Fraction], policies: Sequence[str], alphas: list[float]
) -> dict[str, Any]:
    """Replay a trace at several pool sizes, ready for JSON.

    Hit rates count the passes in which every row decodes. A fraction whose pool would be smaller
    than the trace's top-k is replayed at that size, the smallest that works.

    Args:
        trace: the recorded run.
        fractions: device slots a layer, as shares of the most live tokens of a decoding pass.
        policies: of `REPLAYS`.
        alphas: for `threshold_figures`.
    """
    live = trace.live_tokens()
    passes = trace.decodes()
    pools = []
    for fraction in fractions:
        slots = max(trace.topk, int(live * fraction))
        pools.append(
            {
                "fraction": str(fraction),
                "device_slots": slots,
                "policies": {
                    name: _figures(_replay(trace, slots, name), passes) for name in policies
                },
            }
        )
    return {
        "meta": trace.meta,
        "num_sequences": len(trace.sequence_prompt_lens),
        "num_passes": trace.num_passes,
        "num_decode_passes": int(passes.sum()),
        "live_tokens": live,
        "topk": trace.topk,
        "layers": trace.layers,
        "turnover_by_layer": turnover(trace),
        "pools": pools,
        "thresholds": threshold_figures(trace, alphas),
    }


def turnover(trace: Trace) -> list[float | None]:
    """By layer, the share of a decoding row's selection that the row before didn't select."""
    prompt_lens = trace.sequence_prompt_lens[trace.row_sequence]
    decodes = (trace.row_position >= prompt_lens)[trace.row_selected]
    owners = trace.row_sequence[trace.row_selected]
    rates: list[float | None] = []
    for positions in trace.positions:
        new = total = 0
        previous: dict[int, Any] = {}
        for row in np.flatnonzero(decodes).tolist():
            chosen = positions[row][positions[row] >= 0]
            before = previous.get(owners[row])
            if before is not None:
                new += np.setdiff1d(chosen, before, assume_unique=True).size
                total += chosen.size
            previous[owners[row]] = chosen
        rates.append(new / total if total else None)
    return rates


def render_replay(figures: dict[str, Any]) -> str:
    """The block that `bench trace replay` prints."""
    policies = list(figures["pools"][0]["policies"]) if figures["pools"] else []
    what = (
        "{num_sequences} sequences, {num_decode_passes} decoding passes of {num_passes},"
        " {live_tokens} live tokens, top-k {topk}".format_map(figures)
    )
    rates = [
        [
            pool["fraction"],
            pool["device_slots"],
            *(f"{100 * pool['policies'][name]['hit_rate']:.2f}%" for name in policies),
        ]
        for pool in figures["pools"]
    ]
    predicted = []
    for row in figures["thresholds"]["by_alpha"]:
        if row["covered"] is not None:
            error, candidates = row["relative_error"], row["candidates"]
            predicted.append([
                f"{row['alpha']:g}", f"{error['mean']:.4f}, {error['p90']:.4f}",
                f"{candidates['median']:.3f}, {candidates['p90']:.3f}", f"{row['covered']:.4f}",
            ])  # fmt: skip
    header = ("alpha", "relative error (mean, p90)", "candidates / k (median, p90)", "covered")
    tables = table(("pool", "device slots", *policies), rates), table(header, predicted, words=0)
    return "\n\n".join([what, *tables])


def plot_replay(figures: dict[str, Any], folder: Path) -> list[Path]:
    """Draw hit rate by pool, hit rate by layer (paper's Fig 17) and predictions (Figs 7, 8).

    Returns:
        the PNG files.
    """
    return [
        _plot_pools(figures, folder / "hit-rate-by-pool.png"),
        _plot_layers(figures, folder / "hit-rate-by-layer.png"),
        _plot_predictions(figures, folder / "kth-score-prediction.png"),
    ]


def _replay(trace: Trace, slots: int, name: str) -> ReplayResult:
    return belady(trace, slots) if name == BELADY else replay(trace, slots, POLICIES[name])


def _figures(result: ReplayResult, passes: Any) -> dict[str, Any]:
    return {
        "hit_rate": result.hit_rate(passes),
        "hit_rate_by_layer": result.hit_rates(passes),
        "selected_rows": int(result.selected[:, passes].sum()),
        "recalled_rows": int(result.recalled[:, passes].sum()),
    }


def _plot_pools(figures: dict[str, Any], path: Path) -> Path:
    drawing, axes = figure(columns=1)
    pools = figures["pools"]
    for name in pools[0]["policies"]:
        rates = [pool["policies"][name]["hit_rate"] for pool in pools]
        axes[0].plot([pool["fraction"] for pool in pools], rates, marker="o", label=name)
    axes[0].set_xlabel("device pool / live tokens")
    axes[0].set_ylabel("hit rate, all layers")
    axes[0].legend()
    return save_figure(drawing, path)


def _plot_layers(figures: dict[str, Any], path: Path) -> Path:
    drawing, axes = figure(columns=1)
    name = next(iter(figures["pools"][0]["policies"]))
    layers = np.array(figures["layers"])
    width = 0.8 / len(figures["pools"])
    for index, pool in enumerate(figures["pools"]):
        rates = pool["policies"][name]["hit_rate_by_layer"]
        axes[0].bar(layers - 0.4 + (index + 0.5) * width, rates, width, label=pool["fraction"])
    axes[0].set_xticks(layers)
    axes[0].set_xlabel("layer")
    axes[0].set_ylabel(f"hit rate, {name}")
    axes[0].legend(title="pool / live tokens", loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(drawing, path)


def _plot_predictions(figures: dict[str, Any], path: Path) -> Path:
    drawing, axes = figure(columns=2)
    rows = [row for row in figures["thresholds"]["by_alpha"] if row["covered"] is not None]
    alphas = [row["alpha"] for row in rows]
    for statistic in ("mean", "median", "p90"):
        for panel, what in enumerate(("relative_error", "candidates")):
            values = [row[what][statistic] for row in rows]
            axes[panel].plot(alphas, values, marker="o", label=statistic)
    axes[0].set_ylabel("relative error of the predicted k-th score")
    axes[1].set_ylabel("tokens above the prediction / k")
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    for one in axes:
        one.set_xlabel("alpha")
        one.legend()
    return save_figure(drawing, path)
