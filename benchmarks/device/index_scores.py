"""The indexer's scores on one Hopper GPU: right first, then how long they take.

    python benchmarks/device/index_scores.py --out index_scores.json

Beside Triton's and, where its package is importable, DeepGEMM's paged logits. The oracle is the
formula in fp64 over the quantised bytes. Each shape has enough layers, every one with pages of its
own, that none is in the L2 cache when it is read. Times are a layer's share of a CUDA graph over
all of them, the median of replays, variants in turn.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echokv.bench.report import environment
from echokv.kernels.cuda import index_scores as cuda
from echokv.kernels.reference.index_keys import quantise_ue8m0, rotate
from echokv.kernels.reference.index_scores import score_width
from echokv.kernels.triton import index_scores as triton
from echokv.kernels.triton.index_keys import quantise_query
from echokv.memory.formats import IndexKeyFormat

FMT = IndexKeyFormat(name="fp8", head_dim=128)
SHAPES = ((13, 98_304), (13, 32_768), (102, 16_384), (1, 98_304), (2, 98_304), (64, 32_768))
PREFILL = (512, 32_768)  # rows of one request
L2_BYTES = 50 * 2**20
HAS_DEEP_GEMM = importlib.util.find_spec("deep_gemm") is not None
ROUNDS = 30
LAUNCHES = 16  # in a graph, at least: what a graph itself costs is shared among them


@dataclass
class Case:
    """A pass over some layers: queries of one token a request, and pages in random order."""

    query: Tensor  # [T, H, 128]
    weights: Tensor
    pages: list[Tensor]  # a layer's, [n_pages, 8448]
    tables: Tensor
    rows: Tensor
    lens: Tensor
    longest: int

    def run(self, op: Callable[..., Tensor], layer: int = 0) -> Tensor:
        """One layer's scores by an implementation of the op."""
        return op(
            self.query, self.weights, self.pages[layer], FMT, self.tables, self.rows, self.lens,
            self.longest,
        )  # fmt: skip


def make_case(lens: list[int], heads: int, layers: int, device: torch.device) -> Case:
    """Normal keys and queries; what no request owns is NaN."""
    blocks = [-(-length // 64) for length in lens]
    total = sum(blocks)
    tables = torch.full((len(lens), max(1, *blocks)), -1, dtype=torch.int32)
    ids, at = torch.randperm(total + 1)[:total].to(torch.int32), 0
    for row, count in enumerate(blocks):
        tables[row, :count] = ids[at : at + count]
        at += count
    pages = []
    for _ in range(layers):
        layer = torch.full((total + 1, FMT.page_bytes), 0xFF, dtype=torch.uint8, device=device)
        codes = torch.randn(total + 1, 64 * 128, device=device) * 64
        layer[:, : 64 * 128] = codes.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.exp2(torch.randint(-9, -5, (total + 1, 64), device=device).float())
        layer[:, 64 * 128 :] = scales.view(torch.uint8)
        for row, length in enumerate(lens):  # the keys past a row's end
            if length % 64:
                page = layer[int(tables[row, blocks[row] - 1])]
                page[length % 64 * 128 : 64 * 128] = 0xFF
                page[64 * 128 + length % 64 * 4 :] = 0xFF
        pages.append(layer)
    return Case(
        torch.randn(len(lens), heads, 128, dtype=torch.bfloat16, device=device),
        torch.randn(len(lens), heads, device=device), pages, tables.to(device),
        torch.arange(len(lens), dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device), max(lens),
    )  # fmt: skip


def plain_scores(case: Case, row: int, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One row's scores in plain PyTorch from the bytes that are stored; and the terms' sizes."""
    length = int(case.lens[row])
    picked = case.pages[layer][case.tables[row, : -(-length // 64)].long()]
    keys = picked[:, : 64 * 128].view(torch.float8_e4m3fn).to(dtype).reshape(-1, 128)[:length]
    scales = picked[:, 64 * 128 :].contiguous().view(torch.float32).to(dtype).flatten()[:length]
    codes, factors = quantise_ue8m0(rotate(case.query[row]))
    dots = torch.relu(codes.to(dtype) @ keys.T)
    weights = (case.weights[row] * 128**-0.5 * factors).to(dtype)
    return weights @ dots * scales, weights.abs() @ dots * scales


def check(heads: int, lens: list[int], device: torch.device) -> dict[str, Any]:
    """Against fp64: off by at most twice what bf16 in PyTorch is, and 2^-11 of the terms."""
    case = make_case(lens, heads, 1, device)
    ours, again = case.run(cuda.index_scores), case.run(cuda.index_scores)
    worst = {"cuda": 0.0, "triton": 0.0, "torch_bfloat16": 0.0}
    ok, portable = torch.equal(ours, again), case.run(triton.index_scores)
    for row, length in enumerate(lens):
        ok &= bool((ours[row, length:] == -torch.inf).all())
        if length == 0:
            continue
        exact, size = plain_scores(case, row, 0, torch.float64)
        plain = plain_scores(case, row, 0, torch.bfloat16)[0]
        found = {"cuda": ours[row, :length], "triton": portable[row, :length],
                 "torch_bfloat16": plain}  # fmt: skip
        errors = {name: float((got - exact).abs().max()) for name, got in found.items()}
        most = float(size.max())
        ok &= errors["cuda"] <= min(2 * errors["torch_bfloat16"] + 2**-13 * most, 2**-11 * most)
        worst = {name: max(worst[name], error / most) for name, error in errors.items()}
    return {"heads": heads, "rows": len(lens), "longest": max(lens), "ok": bool(ok),
            "largest_error_over_size": worst}  # fmt: skip


CHECKED = (
    [1, 63, 64, 65, 2047, 2048, 2049, 0, 0, 4097, 191],
    [98_304, 0, 12_345],
    [(7 * row) % 300 for row in range(700)],
    [16_384] * 102,
    [0, 0],
)


class DeepGemm:
    """DeepGEMM's paged logits on the same pages, its schedule made beforehand, as it is meant."""

    def __init__(self, case: Case) -> None:
        import deep_gemm

        self.module, self.case = deep_gemm, case
        codes, factors = quantise_ue8m0(rotate(case.query))
        self.query = codes[:, None].contiguous()
        self.weights = case.weights * factors * 128**-0.5
        self.lens = case.lens[:, None].contiguous()
        self.schedule = deep_gemm.get_paged_mqa_logits_metadata(
            self.lens, 64, deep_gemm.get_num_sms()
        )

    def __call__(self, layer: int) -> Tensor:
        """One layer's logits; what lies past a context is left as it was."""
        return self.module.fp8_paged_mqa_logits(
            self.query, self.case.pages[layer].view(-1, 64, 1, 132), self.weights, self.lens,
            self.case.tables, self.schedule, self.case.longest, clean_logits=False,
        )  # fmt: skip


def interleaved(variants: dict[str, Callable[[], object]], share: int) -> dict[str, float]:
    """Median microseconds of each variant's graph, divided by `share`."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, run in variants.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1e3 / share)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def time_shape(
    rows: int, length: int, device: torch.device, *, prefill: bool = False
) -> dict[str, Any]:
    """One shape: the whole op, and the scores alone from a query that is already quantised."""
    layers = max(2, 4 * L2_BYTES // (rows * length * 132))
    case = make_case([length] * (1 if prefill else rows), 64, layers, device)
    if prefill:
        case.query = torch.randn(rows, 64, 128, dtype=torch.bfloat16, device=device)
        case.weights = torch.randn(rows, 64, device=device)
        case.rows = torch.zeros(rows, dtype=torch.int32, device=device)
        case.lens = torch.arange(length - rows + 1, length + 1, dtype=torch.int32, device=device)
    images = cuda.quantise_query(case.query, case.weights)
    out = torch.empty(rows, score_width(length), device=device)
    repeats = -(-LAUNCHES // layers)
    each = [*range(layers)] * repeats

    def scores_only(layer: int) -> None:
        cuda.score_images(images, 64, case.pages[layer], case.tables, case.rows, case.lens, out)

    variants: dict[str, Callable[[], object]] = {
        "cuda": lambda: [case.run(cuda.index_scores, layer) for layer in each],
        "triton": lambda: [case.run(triton.index_scores, layer) for layer in each],
        "cuda, query quantised": lambda: [scores_only(layer) for layer in each],
    }
    gap = None
    if HAS_DEEP_GEMM and not prefill:  # its table is a row's own
        theirs = DeepGemm(case)
        logits, ours = theirs(0), case.run(cuda.index_scores)
        gap = float((logits[:, :length] - ours[:, :length]).abs().max())
        variants["deep_gemm, query quantised"] = lambda: [theirs(layer) for layer in each]
        variants["triton's quantisation, deep_gemm"] = lambda: [
            (quantise_query(case.query, case.weights, 128), theirs(layer)) for layer in each
        ]
    times = interleaved(variants, len(each))
    moved = rows * length * (132 + 4)
    line = ", ".join(f"{name} {taken:.1f}" for name, taken in times.items())
    print(f"{rows} x {length} ({layers} layers): {line} us", flush=True)
    return {"rows": rows, "length": length, "layers": layers, "bytes": moved,
            "largest_gap_to_deep_gemm": gap, "median_us": times}  # fmt: skip


def main() -> None:
    """Parse flags, check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda")
    checks = [check(heads, lens, device) for heads in (64, 32) for lens in CHECKED]
    for verdict in checks:
        print(verdict, flush=True)
    if not all(verdict["ok"] for verdict in checks):
        sys.exit("wrong scores: nothing is timed")
    found: dict[str, Any] = {"environment": environment(args.commit), "checks": checks}
    found["timings"] = []
    for rows, length in (*SHAPES[:4], PREFILL, *SHAPES[4:]):
        taken = time_shape(rows, length, device, prefill=(rows, length) == PREFILL)
        found["timings"].append(taken)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
