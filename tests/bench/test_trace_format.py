"""A trace survives its file bit by bit; codes keep the product's priority levels."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.bench.traces import made_up_trace

from echokv.bench.trace_format import (
    Trace,
    code_scores,
    load_trace,
    save_trace,
    score_codes,
    selected_rows_by_pass,
)
from echokv.errors import ConfigError
from echokv.kernels.reference.priorities import score_priorities


def assert_same(one: Trace, other: Trace) -> None:
    for field in dataclasses.fields(Trace):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if field.name != "meta":
            assert mine.dtype == its.dtype, field.name
            np.testing.assert_array_equal(mine, its, err_msg=field.name)


@pytest.mark.parametrize("hot", [0.0, 0.7, 1.0])
def test_a_trace_survives_its_file(tmp_path: Path, hot: float) -> None:
    trace = made_up_trace(1, hot=hot)
    rows = trace.positions.shape[1]
    trace.kth_scores[0, 0], trace.rank_scores[1, 2] = -np.inf, np.nan
    save_trace(trace, tmp_path / "folder" / "trace.npz")
    back = load_trace(tmp_path / "folder" / "trace.npz")
    assert_same(trace, back)
    assert (back.topk, back.layers, back.num_passes) == (8, [0, 1], 30)
    assert sum(part.stop - part.start for _, part in selected_rows_by_pass(back)) == rows


def test_rows_without_a_selection_are_skipped(tmp_path: Path) -> None:
    trace = made_up_trace(2)
    kept = np.arange(trace.row_selected.size) % 3 != 1
    part = dataclasses.replace(
        trace,
        row_selected=kept,
        positions=trace.positions[:, kept],
        score_codes=trace.score_codes[:, kept],
        kth_scores=trace.kth_scores[:, kept],
        rank_scores=trace.rank_scores[:, kept],
    )
    save_trace(part, tmp_path / "trace.npz")
    assert_same(part, load_trace(tmp_path / "trace.npz"))


def test_live_tokens_count_shared_blocks_once() -> None:
    """At the last step: blocks 4 (shared, full), 2 and 0 with 33 and 50 tokens; 3 is gone."""
    trace = made_up_trace(0)
    most = max(64 + 4 + step + 21 + step + (6 + step if step < 15 else 0) for step in range(30))
    assert trace.live_tokens() == most
    assert trace.decodes().all()
    assert trace.slots(np.int32(1), np.array([0, 63, 64, -1], np.int32)).tolist() == [
        256,
        319,
        0,
        -1,
    ]


@pytest.mark.parametrize("kind", ["normal", "equal", "two", "tiny", "edges", "padded"])
def test_codes_keep_the_priority_levels(kind: str) -> None:
    torch.manual_seed(5)
    scores = torch.randn(40, 33)
    slots = torch.arange(33, dtype=torch.int32).expand(40, 33).contiguous()
    if kind == "equal":
        scores = torch.full_like(scores, 3.25)
    elif kind == "two":
        scores = torch.where(scores > 0, 1.0, 1.0 + 2**-23)
    elif kind == "tiny":
        scores *= 1e-38
    elif kind == "edges":  # on the boundaries between levels and bins
        scores = torch.randint(0, 253, (40, 33)) / 252
    elif kind == "padded":
        slots = torch.where(torch.rand(40, 33) < 0.5, -1, slots)
        scores = scores.masked_fill(slots < 0, float("-inf"))

    def levels(of: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(slots)
        score_priorities(torch.zeros(1, dtype=torch.int32), of, slots, out)
        return out

    chosen = slots.numpy() >= 0
    codes = score_codes(scores.numpy(), chosen, levels(scores).clamp(min=1).numpy())
    assert torch.equal(levels(torch.from_numpy(code_scores(codes))), levels(scores))
    order = np.where(chosen, scores.numpy(), np.nan)
    for row, code in zip(order, codes.astype(int), strict=True):
        ranked = np.argsort(row, kind="stable")[: np.isfinite(row).sum()]
        assert (np.diff(code[ranked]) >= 0).all()


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        load_trace(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("not an archive")
    with pytest.raises(ConfigError, match="not a trace"):
        load_trace(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ConfigError, match="not a trace"):
        load_trace(tmp_path / "other.npz")
    meta = json.dumps({"format": "echokv-trace", "version": 2})
    np.savez(tmp_path / "later.npz", meta=np.array(meta))
    with pytest.raises(ConfigError, match="version 2; this code reads 'echokv-trace' version 1"):
        load_trace(tmp_path / "later.npz")
    meta = json.dumps({"format": "echokv-trace", "version": 1, "topk": 8})
    np.savez(tmp_path / "short.npz", meta=np.array(meta))
    with pytest.raises(ConfigError, match="damaged"):
        load_trace(tmp_path / "short.npz")
