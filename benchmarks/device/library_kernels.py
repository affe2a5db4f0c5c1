"""FlashMLA and DeepGEMM beside our portable kernels at DeepSeek-V3.2's sizes; writes JSON.

    python benchmarks/device/library_kernels.py --output library_kernels.json

Each case is checked against fp64 (attention, scores) or against plain PyTorch over the same fp8
values (products) before it is timed: medians of CUDA graph replays, variants interleaved. Weights
are rotated over several copies, so that none is read from the L2 cache. DeepGEMM compiles a kernel
for each shape of a weight (2 to 6 s each): `--parts` picks what runs, `--no-deepgemm-products`
leaves those out. `--tiles` times other ways to cut the Triton products too.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import kernels as common  # benchmarks/device/kernels.py
from echokv.bench.report import environment
from echokv.kernels.deepgemm import fp8_experts as deepgemm_experts
from echokv.kernels.deepgemm import fp8_linear as deepgemm_linear
from echokv.kernels.deepgemm.index_scores import DeepGemmScores
from echokv.kernels.flashmla.sparse_mla import FlashMla
from echokv.kernels.reference.fp8_linear import (
    dequantise,
    dequantise_blocks,
    quantise_activations,
)
from echokv.kernels.registry import load_kernels
from echokv.kernels.triton.fp8_experts import expert_tiles, fp8_experts, group_by_expert
from echokv.kernels.triton.fp8_linear import linear_tiles
from echokv.kernels.triton.fp8_product import Tiles, product

PARTS = ("attention", "logits", "products", "experts")
BATCHES = (1, 13, 64)
SCORES = ((1, 98_304), (13, 32_768), (13, 98_304), (64, 32_768))
WEIGHTS = {
    "q_a": (1536, 7168),
    "kv_a": (576, 7168),
    "q_b": (24_576, 1536),
    "index wq_b": (8192, 1536),
    "o_proj": (7168, 16_384),
    "shared down": (7168, 2048),
    "dense gate or up": (18_432, 7168),
    "dense down": (7168, 18_432),
}
EXPERTS, HIDDEN, INNER, CHOICES = 32, 7168, 2048, 8
MANY_BYTES = 150e6
"""Weights are copied until they take this much: three times the L2 cache."""

Pair = tuple[Tensor, Tensor]


def fp8_weight(device: torch.device, *shape: int) -> Pair:
    """Random e4m3 values and the scales of their blocks."""
    *stack, rows, columns = shape
    values = torch.randint(0, 240, shape, dtype=torch.uint8, device=device)
    values = torch.where(values % 128 < 120, values, values - 16)  # no NaN, |x| < 256
    scales = torch.rand(*stack, -(-rows // 128), columns // 128, device=device) * 1e-4 + 1e-5
    return values.view(torch.float8_e4m3fn), scales


def attention(bench: common.Bench) -> None:
    """Sparse decode over fp8 rows."""
    library = FlashMla()
    for batch in BATCHES:
        case = common.mla_case(bench, "fp8_ds_mla", batch, 0)
        arguments = (case.query, case.pool, case.slots, case.fmt, common.SCALE)
        variants: dict[str, Callable[[], Tensor]] = {
            "flashmla": partial(library.decode, *arguments),
            "triton": partial(bench.kernels.sparse_mla, *arguments),
        }
        exact, plain = case.dense(batch - 1, torch.float64), case.dense(batch - 1, torch.bfloat16)
        allowed = 2 * float((plain - exact).abs().max()) + 2**-7 * float(exact.abs().max())
        for name, run in variants.items():
            error = float((run()[batch - 1].double().cpu() - exact).abs().max())
            bench.check(f"{name} batch {batch}", error <= allowed, error=error, allowed=allowed)
        moved = batch * bench.sizes.k * case.fmt.row_bytes
        common.compare(
            bench, "sparse_mla", f"batch {batch}", moved,
            {**variants, "torch": common.plain_mla(case)},
        )  # fmt: skip


def logits(bench: common.Bench) -> None:
    """Index scores, and the schedule that DeepGEMM makes once a step."""
    library = DeepGemmScores()
    for batch, length in SCORES:
        case = common.scores_case(bench, "fp8", batch, length, 0)
        requests = torch.arange(batch, dtype=torch.int32, device=bench.device)
        cut = partial(library.schedule, case.tables, requests, case.lens, length)
        schedule = cut()
        score = partial(
            library.index_scores, case.query, case.weights, case.pages, case.fmt, schedule
        )
        count = int(case.lens[-1])
        exact, size = case.exact(batch - 1)
        error = float((score()[-1, :count].cpu() - exact).abs().max())
        allowed = float(size.max()) * 2**-11
        label = f"deepgemm scores {batch} x {length}"
        bench.check(label, error <= allowed, error=error, allowed=allowed)
        moved = batch * length * (case.fmt.key_bytes + 4)
        variants = {
            "deepgemm": score,
            "triton": partial(case.run, bench.kernels),
            "deepgemm schedule": cut,
        }
        common.compare(bench, "index_scores", f"{batch} x {length}", moved, variants)


def other_tiles(rows: int) -> dict[str, Tiles]:
    """Other ways to cut a product, to compare with what is chosen."""
    height, many = (16, False) if rows <= 16 else (64, True)
    return {
        f"c{columns} w{warps}{' swapped' * swapped} x{splits}": Tiles(
            rows=height, columns=columns, warps=warps, swapped=swapped, splits=splits,
            quantised=many,
        )
        for columns, warps in ((32, 4), (64, 4), (128, 8))
        for swapped in (False, True)
        for splits in (1, 4)
        if not (swapped and columns < 64)
    }  # fmt: skip


def products(bench: common.Bench, args: argparse.Namespace) -> None:
    """One matrix of each kind, at decode's numbers of tokens."""
    for name, (columns, width) in WEIGHTS.items():
        copies = max(1, min(8, int(MANY_BYTES // (columns * width))))
        weights = [fp8_weight(bench.device, columns, width) for _ in range(copies)]
        wide = dequantise_blocks(*weights[0]).bfloat16()
        for tokens in BATCHES:
            x = torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16)
            functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
                "triton": partial(bench.kernels.fp8_linear, x)
            }
            if not args.no_deepgemm_products:
                functions["deepgemm"] = partial(deepgemm_linear.fp8_linear, x)
            if args.tiles:
                functions |= {
                    label: lambda w, s, t=tiles, x=x: product(x, w, s, t)
                    for label, tiles in other_tiles(tokens).items()
                    if width // 128 % tiles.splits == 0
                }
            exact = functional.linear(
                dequantise(*quantise_activations(x)), dequantise_blocks(*weights[0])
            )
            check_products(bench, name, tokens, functions, weights[0], exact)
            variants = {label: Rotated(run, weights) for label, run in functions.items()}
            variants["torch, bf16 weights"] = partial(functional.linear, x, wide)
            chosen = linear_tiles(tokens, columns, width, gated=False)
            case = f"{name} {columns} x {width} tokens {tokens} (splits {chosen.splits})"
            common.compare(bench, "fp8_linear", case, columns * width, variants)


class Rotated:
    """Calls a function with one weight after the other."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], weights: list[Pair]) -> None:
        self._run, self._weights, self._turn = run, weights, 0

    def __call__(self) -> Tensor:
        """The next product."""
        self._turn += 1
        return self._run(*self._weights[self._turn % len(self._weights)])


def check_products(
    bench: common.Bench,
    name: str,
    tokens: int,
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]],
    weight: Pair,
    exact: Tensor,
) -> None:
    """Against fp32 over the same fp8 values: a rounding to bf16, and fp8 sums of 14 bits."""
    allowed = 2**-7 * float(exact.abs().max())
    for label, run in functions.items():
        error = float((run(*weight).float() - exact).abs().max())
        title = f"{label}: {name} tokens {tokens}"
        bench.check(title, error <= allowed, error=error, allowed=allowed)


def experts(bench: common.Bench, args: argparse.Namespace) -> None:
    """The routed experts of one layer of an eighth of the model."""
    gate_up = fp8_weight(bench.device, EXPERTS, 2 * INNER, HIDDEN)
    down = fp8_weight(bench.device, EXPERTS, HIDDEN, INNER)
    for tokens in BATCHES:
        x = torch.randn(tokens, HIDDEN, device=bench.device, dtype=torch.bfloat16)
        chosen = torch.rand(tokens, EXPERTS, device=bench.device).argsort(1)[:, :CHOICES]
        chosen = chosen.contiguous()
        weights = torch.rand(tokens, CHOICES, device=bench.device)
        arguments = (x, chosen, weights, *gate_up, *down)
        variants: dict[str, Callable[[], Any]] = {"triton": partial(fp8_experts, *arguments)}
        if not args.no_deepgemm_products:
            variants["deepgemm"] = partial(deepgemm_experts.fp8_experts, *arguments)
            exact, got = variants["triton"](), variants["deepgemm"]()
            error = float((got - exact).norm() / exact.norm())
            bench.check(f"deepgemm experts tokens {tokens}", error < 0.02, error=error)
        used = len(chosen.unique())
        case = f"{EXPERTS} experts, {used} used, tokens {tokens}"
        common.compare(bench, "fp8_experts", case, 3 * used * INNER * HIDDEN, variants)
        if args.tiles:
            time_expert_tiles(bench, x, chosen, gate_up, used)


def time_expert_tiles(
    bench: common.Bench, x: Tensor, chosen: Tensor, gate_up: Pair, used: int
) -> None:
    """The first product alone, cut in other ways."""
    best, _ = expert_tiles(chosen.numel(), EXPERTS)
    groups = group_by_expert(chosen, EXPERTS, best.rows)
    variants = {
        label: partial(product, x, *gate_up, tiles, gated=True, groups=groups, fan_out=CHOICES)
        for label, tiles in {"chosen": best, **other_tiles(best.rows)}.items()
        if tiles.splits == 1 and tiles.rows == best.rows
    }
    case = f"tokens {x.shape[0]}"
    common.compare(bench, "experts' gate and up", case, 2 * used * INNER * HIDDEN, variants)


def main() -> None:
    """Parse flags, check and time part by part, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--no-deepgemm-products", action="store_true")
    parser.add_argument("--tiles", action="store_true", help="time other tiles of our products")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    torch.manual_seed(7)
    device = torch.device("cuda", torch.cuda.current_device())
    bench = common.Bench(load_kernels("triton", device), device, common.Sizes(rounds=15))
    runs: dict[str, Callable[[], None]] = {
        "attention": partial(attention, bench),
        "logits": partial(logits, bench),
        "products": partial(products, bench, args),
        "experts": partial(experts, bench, args),
    }
    for part in args.parts:
        done = len(bench.timings)
        runs[part]()
        for row in bench.timings[done:]:
            print(
                f"{row['op']:20} {row['case']:44} {row['variant']:22} {row['median_us']:8.1f} us,"
                f" {row['gb_per_s']:.0f} GB/s",
                flush=True,
            )
        report = environment(args.commit) | {"checks": bench.checks, "timings": bench.timings}
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
