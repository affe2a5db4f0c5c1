"""Parts of a prefill's indexer on one Hopper GPU: scores, exact top-k, recall; each alone.

    python benchmarks/device/prefill_parts.py --output prefill_parts.json

The last queries of one request over its pages, in random order. Scores are checked before
anything is timed: against the formula in fp64, and against the kernel that scores row by row, bit
for bit. Beside ours run Triton's and, where its package is importable, DeepGEMM's two kernels:
paged logits (one row a query) and those of contiguous keys, gathering them included or not. Medians
of graph replays, variants in turn.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import index_scores as decode  # benchmarks/device/index_scores.py
import torch
from torch import Tensor

from echokv.bench.report import environment
from echokv.kernels.cuda import index_scores as cuda
from echokv.kernels.cuda import prefill_scores as tiled
from echokv.kernels.cuda import topk as cuda_topk
from echokv.kernels.reference.index_keys import quantise_ue8m0, rotate
from echokv.kernels.reference.index_scores import score_width
from echokv.kernels.triton import index_scores as triton

SHAPES = ((256, 65_536), (512, 65_536), (512, 32_768), (2048, 65_536), (2048, 16_384))
TOPK = 2048
HEADS = 64


def make_case(queries: int, context: int, device: torch.device) -> decode.Case:
    """One request's last queries."""
    case = decode.make_case([context], HEADS, 1, device)
    case.query = torch.randn(queries, HEADS, 128, dtype=torch.bfloat16, device=device)
    case.weights = torch.randn(queries, HEADS, device=device)
    case.rows = torch.zeros(queries, dtype=torch.int32, device=device)
    case.lens = torch.arange(context - queries + 1, context + 1, dtype=torch.int32, device=device)
    return case


def exact_row(case: decode.Case, row: int) -> Tensor:
    """One row's scores in fp64."""
    whole = decode.Case(
        case.query, case.weights, case.pages,
        case.tables.expand(case.query.shape[0], -1), case.rows, case.lens, case.longest,
    )  # fmt: skip
    return decode.plain_scores(whole, row, 0, torch.float64)[0]


class Contiguous:
    """DeepGEMM's logits of contiguous keys."""

    def __init__(self, case: decode.Case) -> None:
        import deep_gemm

        self.module, self.case = deep_gemm, case
        codes, factors = quantise_ue8m0(rotate(case.query))
        self.query = codes.contiguous()
        self.weights = (case.weights * factors * 128**-0.5).contiguous()
        self.starts = torch.zeros_like(case.lens)
        self.keys = self.gather()

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and scales of the whole context, from its pages."""
        picked = self.case.pages[0][self.case.tables[0].long()]
        keys = picked[:, : 64 * 128].reshape(-1, 128).view(torch.float8_e4m3fn)
        return keys, picked[:, 64 * 128 :].contiguous().view(torch.float32).flatten()

    def __call__(self, keys: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The logits; unspecified past each row's context."""
        return self.module.fp8_mqa_logits(
            self.query, keys or self.keys, self.weights, self.starts, self.case.lens,
            clean_logits=False,
        )  # fmt: skip


def time_shape(queries: int, context: int, device: torch.device) -> dict[str, Any]:
    """One shape, checked, then timed."""
    case = make_case(queries, context, device)
    ours = case.run(cuda.index_scores)
    gaps = {"cuda": ours}
    images = cuda.quantise_query(case.query, case.weights)
    out = torch.empty(queries, score_width(context), device=device)
    arguments = (images, HEADS, case.pages[0], case.tables, case.rows, case.lens, out)
    cuda.score_images(*arguments)
    same = torch.equal(out, ours)
    scores: dict[str, Callable[[], object]] = {
        "cuda": lambda: case.run(cuda.index_scores),
        "cuda, query quantised": lambda: tiled.score_images(*arguments),
        "cuda, row by row": lambda: cuda.score_images(*arguments),
    }
    if decode.HAS_DEEP_GEMM:
        theirs = Contiguous(case)
        gaps["deep_gemm, contiguous"] = theirs()
        scores["deep_gemm, contiguous"] = theirs
        scores["gathered, deep_gemm, contiguous"] = lambda: theirs(theirs.gather())
        if queries <= 512:
            rows = decode.Case(
                case.query, case.weights, case.pages,
                case.tables.expand(queries, -1).contiguous(), case.rows, case.lens, context,
            )  # fmt: skip
            paged = decode.DeepGemm(rows)
            scores["deep_gemm, paged"] = lambda: paged(0)
    if queries <= 256:
        gaps["triton"] = case.run(triton.index_scores)
        scores["triton"] = lambda: case.run(triton.index_scores)
    wrong = {}
    for name, found in gaps.items():
        for row in (0, queries // 2, queries - 1):
            length = int(case.lens[row])
            exact = exact_row(case, row)
            gap = float((found[row, :length] - exact).abs().max() / exact.abs().max())
            wrong[name] = max(wrong.get(name, 0.0), gap)
    print(f"{queries} x {context}: {same=}, largest error over largest score {wrong}", flush=True)
    if wrong["cuda"] > 1e-3 or not same:
        sys.exit("wrong scores: nothing is timed")
    times = decode.interleaved(scores, 1)
    others: dict[str, Callable[[], object]] = {
        "topk": lambda: cuda_topk.topk(ours, case.lens, TOPK),
    }
    times |= decode.interleaved(others, 1)
    dots = int(case.lens.sum()) * HEADS * 128 * 2
    tflops = {name: dots / times[name] / 1e6 for name in scores}
    line = ", ".join(f"{name} {times[name]:.0f}" for name in times)
    print(f"  us: {line}")
    print("  TFLOP/s:", {name: round(value) for name, value in tflops.items()}, flush=True)
    return {"queries": queries, "context": context, "errors": wrong, "us": times,
            "tflops": tflops}  # fmt: skip


def main() -> None:
    """Parse flags, check, time, write after each shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--shapes", nargs="+", help="QUERIESxCONTEXT; default: a few of a prefill")
    args = parser.parse_args()
    shapes = SHAPES
    if args.shapes:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in args.shapes)
    torch.manual_seed(1)
    device = torch.device("cuda")
    found: dict[str, Any] = {"environment": environment(args.commit), "shapes": []}
    for queries, context in shapes:
        found["shapes"].append(time_shape(queries, context, device))
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
