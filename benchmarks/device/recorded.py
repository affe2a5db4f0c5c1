"""How far off predictions were, and which rows were absent, in traces of the demo model.

From `benchmarks/prefetch_study.py` over its two recordings (prompts of four tasks and of Python
sources, 4 requests of about 4,096 tokens, k = 256, 43 decode steps after 20 to warm up), averaged.
Ranks are in parts of k, so that they carry over to another k.
"""

import torch
from torch import Tensor

CANDIDATES = (
    0.06, 0.26, 0.42, 0.56, 0.67, 0.75, 0.82, 0.9, 0.96, 1.0, 1.03, 1.06, 1.12, 1.21, 1.32, 1.44,
    1.61, 1.99, 2.69, 4.0,
)  # fmt: skip
"""Rows that reach the moving average of the k-th score (alpha 0.5), over k: twenty quantiles, as
likely as each other. The last is where the recording ends."""

ABSENT = {
    0.97: (
        0.03, 0.01, 0.02, 0.02, 0.03, 0.04, 0.06, 0.08, 0.13, 0.17, 0.22, 0.28, 0.33, 0.37,
        0.42, 0.46, 0.5, 0.52, 0.56, 0.58, 0.6, 0.62, 0.63, 0.65, 0.66, 0.68, 0.69, 0.7,
        0.71, 0.72, 0.72, 0.73,
    ),
    0.9: (
        0.05, 0.05, 0.07, 0.08, 0.1, 0.12, 0.14, 0.18, 0.23, 0.29, 0.34, 0.39, 0.44, 0.5,
        0.54, 0.58, 0.62, 0.64, 0.68, 0.7, 0.72, 0.74, 0.76, 0.77, 0.78, 0.8, 0.81, 0.82,
        0.83, 0.83, 0.84, 0.85,
    ),
    0.77: (
        0.11, 0.13, 0.15, 0.18, 0.22, 0.26, 0.32, 0.41, 0.53, 0.63, 0.7, 0.77, 0.82, 0.85,
        0.88, 0.9, 0.91, 0.92, 0.93, 0.94, 0.94, 0.95, 0.95, 0.96, 0.96, 0.96, 0.96, 0.97,
        0.97, 0.97, 0.97, 0.97,
    ),
}  # fmt: skip
"""Share of the rows of a rank that were absent before the step, by eighths of k from the best to
rank 4k, in a pool of the size that gave this hit rate. The smallest pool that holds a step's
selections gave 0.77."""


def absent_by_rank(hit: float, topk: int, ranks: int) -> Tensor:
    """[ranks] float32: the recorded share of the nearest hit rate, for each rank."""
    shares = torch.tensor(ABSENT[min(ABSENT, key=lambda recorded: abs(recorded - hit))])
    return shares[(torch.arange(ranks) * 8 // topk).clamp(max=len(shares) - 1)]


def ranks(topk: int, most: int, rows: int, generator: torch.Generator) -> list[int]:
    """How many rows reach each request's prediction, at least 1 and at most `most`."""
    drawn = torch.randint(len(CANDIDATES), (rows,), generator=generator, device=generator.device)
    return [min(max(round(CANDIDATES[one] * topk), 1), most) for one in drawn.tolist()]
