"""What a sketch of the scores makes of a prediction, on real selections.

    python benchmarks/prefetch_sketch.py build/wide-tasks.npz build/wide-text.npz --out FILE

Recordings are `prefetch_study.py record`'s. Candidates are the rows whose score is at least the
moving average of the k-th scores less a margin. They come in the order in which blocks score them,
each row's context in as many stretches at a time as blocks share it. `prediction` names those that
reach the average; `sketch` those that reach the score that as large a share of what is scored so
far exceeds as the selection is of the whole, and, once everything is scored, those that it missed
(`kernels/cuda/listed.cuh`). Absent ones count, all but the first 20 steps. The last columns say how
many candidates there were, over k.
"""

import argparse
import json
from bisect import insort
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prefetch_study import HITS, WIDTH, Floats, Ints, absences, average, capacity_for

from echokv.bench.report import environment, write_json

STRETCHES = 9  # of a context, scored at the same time: 132 SMs, 13 requests
LEAST = 32 / 2048  # of k: the sketch says nothing before so many are expected
MARGINS = (0.0, 0.1, 0.2, 0.3)
PREDICT = average(0.5)


def orders(slots: Ints) -> list[tuple[int, int]]:
    """First and last host slot of each request: their order is taken for that of positions."""
    return [(int(row[row >= 0].min()), int(row.max())) for row in slots.swapaxes(0, 2)]


def named(
    scores: Floats, when: NDArray[np.float64], topk: int, predicted: float, margin: float
) -> NDArray[np.bool_]:
    """Which of a step's rows, best first, are named while the others are being scored.

    Args:
        scores: [n], descending.
        when: [n], share of its row that is scored by then.
        topk: k.
        predicted: k-th score.
        margin: of the prediction, below which nothing is a candidate.
    """
    low = predicted - margin * abs(predicted)
    found = np.zeros(len(scores), dtype=np.bool_)
    seen: list[float] = []  # descending, negated
    for at in np.argsort(when, kind="stable"):
        if scores[at] < low:
            continue
        insort(seen, -float(scores[at]))
        wanted = int(topk * when[at])
        bar = predicted
        if wanted >= LEAST * topk and wanted > 0:
            bar = -seen[wanted - 1] if wanted <= len(seen) else low
        found[at] = scores[at] >= bar
    return found


def judge(slots: Ints, scores: Floats, topk: int, hit: float) -> dict[str, Any]:
    """Rows that are named, useful and in vain, of those that are missing."""
    spans, missing = orders(slots), 0
    counts = {margin: np.zeros(4) for margin in MARGINS}  # useful, in vain, in the end, candidates
    plain = np.zeros(2)
    steps = 0
    for layer, step, absent in absences(slots, topk, capacity_for(slots, topk, hit)):
        for row, (first, last) in enumerate(spans):
            predicted = PREDICT(scores[layer, :step, row, topk - 1].astype(float).tolist())
            place = (slots[layer, step, row] - first) / (last + 1 - first)
            mine, away = scores[layer, step, row], absent[row]
            missing += int(away[:topk].sum())
            steps += 1
            beating = (mine >= predicted) & away
            plain += (beating[:topk].sum(), beating[topk:].sum())
            for margin, sums in counts.items():
                early = named(mine, place * STRETCHES % 1.0, topk, predicted, margin) & away
                listed = mine >= predicted - margin * abs(predicted)
                sums += (
                    early[:topk].sum(), early[topk:].sum(), (listed & away)[:topk].sum(),
                    listed.sum() / topk,
                )  # fmt: skip
    return {
        "hit_rate": 1 - missing / (steps * topk),
        "prediction": {"useful": plain[0] / missing, "in_vain": plain[1] / missing},
        "sketch": {
            str(margin): {
                "useful": sums[0] / missing, "in_vain": sums[1] / missing,
                "in_the_end": sums[2] / missing, "candidates_over_k": sums[3] / steps,
            }
            for margin, sums in counts.items()
        },
    }  # fmt: skip


def main() -> None:
    """Write what every recording says at every hit rate, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recordings", type=Path, nargs="+", help="npz of prefetch_study.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--commit", help="of the code; default: the git checkout's")
    args = parser.parse_args()
    report: dict[str, Any] = {"environment": environment(args.commit), "recordings": {}}
    for path in args.recordings:
        with np.load(path, allow_pickle=False) as file:
            slots, scores = file["slots"], file["scores"]
        topk = slots.shape[3] // WIDTH
        report["recordings"][path.stem] = [judge(slots, scores, topk, hit) for hit in HITS]
        print(path.stem, json.dumps(report["recordings"][path.stem], indent=1), flush=True)
        write_json(args.out, report)


if __name__ == "__main__":
    main()
