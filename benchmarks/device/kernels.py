"""Check the Triton kernels at real sizes on a GPU, then time them in CUDA graphs; writes JSON.

    python benchmarks/device/kernels.py --output kernels.json

Nothing is timed unless every check passed. Sizes are DeepSeek-V3.2's: 64 index heads x 128, 128
heads over 512 + 64 latent rows, k = 2048. `--small` runs the same code with small sizes, on the CPU
too (with TRITON_INTERPRET=1): that proves the script, its timings mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echokv.bench.report import environment
from echokv.kernels.protocol import Kernels
from echokv.kernels.reference import index_keys as reference_keys
from echokv.kernels.reference import rows as reference_rows
from echokv.kernels.registry import load_kernels
from echokv.log import progress
from echokv.memory.formats import IndexKeyFormat, RowFormat

POISON = 0xFF  # NaN as fp32, as bf16 and as e4m3
SCALE = 192**-0.5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is checked and timed."""

    index_heads: int = 64
    index_dim: int = 128
    heads: int = 128
    latent_dim: int = 512
    rope_dim: int = 64
    k: int = 2048
    batches: tuple[int, ...] = (1, 13)
    lengths: tuple[int, ...] = (16_384, 32_768, 98_304)
    topk_width: int = 1_048_576
    far_bytes: int = 2**32 + 2**28  # pools this large: offsets past 2 ** 31 and 2 ** 32
    rounds: int = 30


SMALL = Sizes(
    index_heads=4, index_dim=32, heads=4, latent_dim=128, rope_dim=32, k=40,
    batches=(1, 3), lengths=(130, 200), topk_width=5000, far_bytes=2**20, rounds=3,
)  # fmt: skip


@dataclass
class Bench:
    """The kernels under test, where they run, and what was found."""

    kernels: Kernels
    device: torch.device
    sizes: Sizes
    checks: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, passed: bool, **numbers: float) -> None:
        """Record one check and stop at the first that fails."""
        self.checks.append({"check": name, "passed": bool(passed), **numbers})
        if not passed:
            raise SystemExit(f"FAILED {name}: {numbers}")


@dataclass
class ScoresCase:
    """Requests of lengths around one, on scattered pages of a poisoned pool."""

    query: Tensor
    weights: Tensor
    pages: Tensor
    fmt: IndexKeyFormat
    tables: Tensor
    lens: Tensor
    longest: int

    def run(self, kernels: Kernels, row: int | None = None) -> Tensor:
        """Scores of every row, or of one."""
        rows = slice(None) if row is None else slice(row, row + 1)
        longest = self.longest if row is None else int(self.lens[row])
        requests = torch.arange(len(self.lens), dtype=torch.int32, device=self.lens.device)[rows]
        return kernels.index_scores(
            self.query[rows].contiguous(), self.weights[rows].contiguous(), self.pages, self.fmt,
            self.tables, requests.contiguous(), self.lens[rows].contiguous(), longest,
        )  # fmt: skip

    def exact(self, row: int) -> tuple[Tensor, Tensor]:
        """fp64 scores of one row over what the pages hold, and sums of the magnitudes."""
        length = int(self.lens[row])
        ids = self.tables[row, : -(-length // 64)].long()
        picked = self.pages[ids].cpu()
        keys = reference_keys.page_values(picked, self.fmt).double()
        query, weights = self.query[row].cpu(), self.weights[row].cpu().double()
        if self.fmt.name == "fp8":
            keys = keys * reference_keys.page_scales(picked, self.fmt).double()[:, :, None]
            codes, scales = reference_keys.quantise_ue8m0(reference_keys.rotate(query))
            vectors = codes.double() * scales.double()[:, None]
        else:
            vectors = query.double()
        keys = keys.flatten(0, 1)[:length]
        dots = torch.relu(vectors @ keys.T * self.fmt.head_dim**-0.5)
        return weights @ dots, weights.abs() @ dots


def scores_case(bench: Bench, name: str, batch: int, length: int, min_bytes: int) -> ScoresCase:
    """`batch` requests of about `length` tokens; the pool has at least min_bytes."""
    sizes, device = bench.sizes, bench.device
    fmt = IndexKeyFormat(name=name, head_dim=sizes.index_dim)
    blocks = -(-length // 64)
    num_pages = max(batch * blocks + 3, min_bytes // fmt.page_bytes)
    pages = torch.full((num_pages, fmt.page_bytes), POISON, dtype=torch.uint8, device=device)
    ids = torch.randperm(num_pages, device=device)[: batch * blocks].to(torch.int32)
    tables = ids.view(batch, blocks)
    lens = torch.tensor([max(1, length - 37 * i) for i in range(batch)], dtype=torch.int32)
    for request in range(batch):
        position = torch.arange(int(lens[request]), device=device)
        slots = tables[request].long()[position // 64] * 64 + position % 64
        keys = torch.randn(len(position), sizes.index_dim, device=device, dtype=torch.bfloat16)
        bench.kernels.write_index_keys(keys, slots.to(torch.int32), pages, fmt)
        sample = slots[:: max(1, len(slots) // 256)]
        small = torch.full((4, fmt.page_bytes), POISON, dtype=torch.uint8)
        near = torch.arange(min(256, len(sample)), dtype=torch.int32)
        picked = keys[:: max(1, len(slots) // 256)][: len(near)].cpu()
        reference_keys.write_index_keys(picked, near, small, fmt)
        far = sample[: len(near)]
        same = torch.equal(key_bytes(pages, far, fmt), key_bytes(small, near.long(), fmt))
        bench.check(f"write_index_keys {name} {num_pages} pages", same)
    query = torch.randn(
        batch, sizes.index_heads, sizes.index_dim, device=device, dtype=torch.bfloat16
    )
    weights = torch.randn(batch, sizes.index_heads, device=device)
    return ScoresCase(query, weights, pages, fmt, tables, lens.to(device), length)


def key_bytes(pages: Tensor, slots: Tensor, fmt: IndexKeyFormat) -> Tensor:
    """The bytes of the keys (and scales) at some host slots."""
    page, at = slots // 64, slots % 64
    values = reference_keys.page_values(pages, fmt)[page, at]
    parts = [values.contiguous().view(torch.uint8)]
    if fmt.name == "fp8":
        parts.append(reference_keys.page_scales(pages, fmt)[page, at][:, None].view(torch.uint8))
    return torch.cat(parts, dim=1).cpu()


def check_scores(bench: Bench) -> None:
    """Against fp64, past 4 GiB, and alone against together."""
    sizes = bench.sizes
    plan = [("fp8", max(sizes.batches), n, 0) for n in sizes.lengths]
    plan += [("bfloat16", max(sizes.batches), sizes.lengths[0], 0)]
    plan += [("fp8", 1, sizes.lengths[-1], sizes.far_bytes)]
    for name, batch, length, far in plan:
        case = scores_case(bench, name, batch, length, far)
        scores = case.run(bench.kernels)
        for row in {0, batch // 2, batch - 1}:
            count = int(case.lens[row])
            exact, size = case.exact(row)
            error = float((scores[row, :count].cpu() - exact).abs().max())
            allowed = float(size.max()) * (2**-11 if name == "fp8" else 2e-6)
            label = f"index_scores {name} batch {batch} length {count}"
            bench.check(label, error <= allowed, error=error, allowed=allowed)
            bench.check(f"{label} tail", bool((scores[row, count:] == -torch.inf).all()))
            alone = case.run(bench.kernels, row)[0, :count]
            bench.check(f"{label} alone", torch.equal(alone, scores[row, :count]))


def bits(pattern: Tensor) -> Tensor:
    """int32 bit patterns as floats."""
    return pattern.to(torch.int32).view(torch.float32)


DISTRIBUTIONS: dict[str, Callable[[int], Tensor]] = {
    "normal": torch.randn,
    "all equal": lambda n: torch.full((n,), 1.5),
    "relu zeros": lambda n: (torch.randn(n) - 2.5).clamp(min=0),
    "signed zeros": lambda n: torch.where(torch.rand(n) < 0.5, -0.0, 0.0),
    "same upper 24 bits": lambda n: bits(0x3FC00000 + torch.randint(0, 256, (n,))),
    "same lower 24 bits": lambda n: bits((torch.randint(0, 127, (n,)) << 24) | 0x123456),
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: -torch.arange(n).float(),
    "two values": lambda n: torch.randint(0, 2, (n,)).float(),
    "all zero": torch.zeros,
    "subnormal": lambda n: bits(torch.randint(0, 4096, (n,))) * torch.sign(torch.randn(n)),
    "infinite": lambda n: torch.where(torch.rand(n) < 0.3, torch.inf, torch.randn(n)),
    "mostly minus infinity": lambda n: torch.where(torch.rand(n) < 0.999, -torch.inf, 1.0),
}


def check_topk(bench: Bench) -> None:
    """Against a stable sort, for every distribution and length."""
    k = bench.sizes.k
    lens = [0, 1, k - 1, k, k + 1, *bench.sizes.lengths, bench.sizes.topk_width]
    for name, make in DISTRIBUTIONS.items():
        for width in sorted({max(64, n) for n in lens}):
            rows = [n for n in lens if n <= width][-3:]
            scores = torch.stack([make(width) for _ in rows]).to(bench.device)
            for row, length in enumerate(rows):
                scores[row, length:] = torch.nan
            context = torch.tensor(rows, dtype=torch.int32, device=bench.device)
            positions, kth = bench.kernels.topk(scores, context, k)
            for row, length in enumerate(rows):
                order = torch.sort(scores[row, :length] + 0.0, descending=True, stable=True)
                want = order.indices[:k].sort().values.to(torch.int32)
                same = torch.equal(positions[row, : len(want)], want)
                same &= bool((positions[row, len(want) :] == -1).all())
                last = float(order.values[k - 1]) if length >= k else -torch.inf
                label = f"topk {name} width {width} length {length}"
                bench.check(label, same and float(kth[row]) == last)


@dataclass
class MlaCase:
    """Tokens that name random rows of a pool of which the rest is NaN."""

    query: Tensor
    pool: Tensor
    slots: Tensor
    fmt: RowFormat

    def run(self, kernels: Kernels, tokens: list[int] | None = None) -> Tensor:
        """Attention of every token, or of some."""
        picked = slice(None) if tokens is None else tokens
        query, slots = self.query[picked].contiguous(), self.slots[picked].contiguous()
        return kernels.sparse_mla(query, self.pool, slots, self.fmt, SCALE)

    def dense(self, token: int, dtype: torch.dtype) -> Tensor:
        """One token in a dtype, in plain PyTorch, returned as fp64 on the CPU."""
        slots = self.slots[token]
        picked = self.pool[slots[slots >= 0].long()].cpu()
        rows = reference_rows.decode_rows(picked, self.fmt, torch.float32)
        rows = rows.to(self.query.device).to(dtype)
        logits = (self.query[token].to(dtype) @ rows.T).to(
            torch.promote_types(dtype, torch.float32)
        )
        probs = torch.softmax(logits * SCALE, dim=1).to(dtype)
        return (probs @ rows[:, : self.fmt.latent_dim]).double().cpu()


def mla_case(bench: Bench, name: str, batch: int, min_bytes: int) -> MlaCase:
    """`batch` tokens with k rows each, the last with fewer; the pool has at least min_bytes."""
    sizes, device = bench.sizes, bench.device
    fmt = RowFormat(name=name, latent_dim=sizes.latent_dim, rope_dim=sizes.rope_dim)
    num_rows = 4 * sizes.k
    num_slots = max(2 * num_rows, min_bytes // fmt.row_bytes)
    latent = torch.randn(num_rows, sizes.latent_dim, device=device, dtype=torch.bfloat16)
    rope = torch.randn(num_rows, sizes.rope_dim, device=device, dtype=torch.bfloat16)
    encoded = bench.kernels.encode_rows(latent, rope, fmt)
    same = torch.equal(encoded.cpu(), reference_rows.encode_rows(latent.cpu(), rope.cpu(), fmt))
    bench.check(f"encode_rows {name}", same)
    decoded = bench.kernels.decode_rows(encoded, fmt, torch.bfloat16).cpu()
    expected = reference_rows.decode_rows(encoded.cpu(), fmt, torch.bfloat16)
    bench.check(f"decode_rows {name}", torch.equal(decoded, expected))
    pool = torch.full((num_slots, fmt.row_bytes), POISON, dtype=torch.uint8, device=device)
    where = torch.randperm(num_slots, device=device)[:num_rows]
    where[0] = num_slots - 1
    pool[where] = encoded
    slots = torch.full((batch, sizes.k), -1, dtype=torch.int32, device=device)
    for token in range(batch):
        count = max(1, sizes.k - 29 * token) if token else sizes.k
        order = torch.randperm(num_rows - 1, device=device)[:count] + 1
        order[0] = 0  # the row at the far end
        slots[token, :count] = where[order].to(torch.int32)
    query = torch.randn(
        batch, sizes.heads, sizes.latent_dim + sizes.rope_dim, device=device, dtype=torch.bfloat16
    )
    return MlaCase(query, pool, slots, fmt)


def check_mla(bench: Bench) -> None:
    """Against fp64 by the twice-plain rule, past 4 GiB, and alone against together."""
    sizes = bench.sizes
    plan = [(name, 70 if bench.device.type == "cuda" else 3, 0) for name in
            ("fp8_ds_mla", "bfloat16")]  # fmt: skip
    plan += [("fp8_ds_mla", 2, sizes.far_bytes), ("bfloat16", 2, sizes.far_bytes)]
    for name, batch, far in plan:
        case = mla_case(bench, name, batch, far)
        case.slots[1:2] = -1 if far == 0 else case.slots[1:2]
        out = case.run(bench.kernels)
        if far == 0:
            bench.check(f"sparse_mla {name} without rows", bool((out[1] == 0).all()))
        for token in (0, batch - 1):
            exact = case.dense(token, torch.float64)
            plain = case.dense(token, torch.bfloat16)
            error = float((out[token].double().cpu() - exact).abs().max())
            rounding = 2**-7 * float(exact.abs().max())
            allowed = 2 * float((plain - exact).abs().max()) + rounding
            label = f"sparse_mla {name} batch {batch} pool {case.pool.numel()} B token {token}"
            bench.check(label, error <= allowed, error=error, allowed=allowed)
            alone = case.run(bench.kernels, [token])[0]
            bench.check(f"{label} alone", torch.equal(alone, out[token]))


def replayable(function: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Something that runs the function once and returns microseconds; a CUDA graph on a GPU."""
    if device.type != "cuda":

        def timed() -> float:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e6

        return timed
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), 10
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()

    def replay() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / repeats

    return replay


def compare(
    bench: Bench, op: str, case: str, moved: int, variants: dict[str, Callable[[], object]]
) -> None:
    """Time variants of one op, interleaved; `moved` is the bytes that it has to read and write."""
    ready = {name: replayable(function, bench.device) for name, function in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(bench.sizes.rounds):
        for name, once in ready.items():
            samples[name].append(once())
    for name, taken in samples.items():
        ordered = sorted(taken)
        median = statistics.median(ordered)
        bench.timings.append(
            {
                "op": op,
                "case": case,
                "variant": name,
                "median_us": median,
                "p10_us": ordered[len(ordered) // 10],
                "p90_us": ordered[-1 - len(ordered) // 10],
                "bytes": moved,
                "gb_per_s": moved / median / 1e3,
            }
        )


def plain_scores(case: ScoresCase) -> Callable[[], object]:
    """The scores from bf16 keys that lie contiguously, by matmul: no pages to follow."""
    batch, _, dim = case.query.shape
    keys = torch.randn(batch, case.longest, dim, device=case.query.device, dtype=torch.bfloat16)

    def run() -> Tensor:
        dots = torch.relu(case.query @ keys.transpose(1, 2))  # [B, H, S]
        return torch.bmm(case.weights.to(dots.dtype)[:, None], dots)

    return run


def plain_mla(case: MlaCase) -> Callable[[], object]:
    """Attention over rows that are gathered from a bf16 pool, by matmul; -1 is not handled."""
    width = case.fmt.latent_dim + case.fmt.rope_dim
    num_slots, device = case.pool.shape[0], case.pool.device
    pool = torch.randn(num_slots, width, device=device, dtype=torch.bfloat16)
    slots = case.slots.clamp(min=0).long()

    def run() -> Tensor:
        rows = pool[slots]  # [B, k, 576]
        probs = torch.softmax((case.query @ rows.transpose(1, 2)).float() * SCALE, dim=2)
        return probs.to(rows.dtype) @ rows[:, :, : case.fmt.latent_dim]

    return run


def measure(bench: Bench) -> None:
    """Time every op at the batches and lengths of the sizes."""
    sizes, kernels = bench.sizes, bench.kernels
    fmt = RowFormat(name="fp8_ds_mla", latent_dim=sizes.latent_dim, rope_dim=sizes.rope_dim)
    for batch in progress(sizes.batches, total=len(sizes.batches), what="timing", unit="batch"):
        for length in sizes.lengths:
            scored = scores_case(bench, "fp8", batch, length, 0)
            case = f"batch {batch} length {length}"
            moved = batch * length * (scored.fmt.key_bytes + 4)
            variants = {"triton": lambda s=scored: s.run(kernels), "torch": plain_scores(scored)}
            compare(bench, "index_scores", case, moved, variants)
            scores = scored.run(kernels)
            lens, k = scored.lens, min(sizes.k, scores.shape[1])
            variants = {
                "triton": lambda s=scores, n=lens: kernels.topk(s, n, sizes.k),
                "torch": lambda s=scores, kk=k: torch.topk(s, kk, dim=1),
            }
            compare(bench, "topk", case, scores.numel() * 4, variants)
        for name in ("fp8_ds_mla", "bfloat16"):
            attended = mla_case(bench, name, batch, 0)
            moved = batch * sizes.k * attended.fmt.row_bytes
            variants = {"triton": lambda a=attended: a.run(kernels), "torch": plain_mla(attended)}
            compare(bench, "sparse_mla", f"{name} batch {batch} k {sizes.k}", moved, variants)
        latent = torch.randn(batch, sizes.latent_dim, device=bench.device, dtype=torch.bfloat16)
        rope = torch.randn(batch, sizes.rope_dim, device=bench.device, dtype=torch.bfloat16)
        variants = {
            "triton": lambda a=latent, b=rope: kernels.encode_rows(a, b, fmt),
            "torch": lambda a=latent, b=rope: reference_rows.encode_rows(a, b, fmt),
        }
        compare(bench, "encode_rows", f"batch {batch}", batch * fmt.row_bytes, variants)


def main() -> None:
    """Parse flags, check, time, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--small", action="store_true", help="small sizes; also without a GPU")
    args = parser.parse_args()
    has_cuda = torch.cuda.is_available()
    if not has_cuda and not args.small:
        sys.exit("no CUDA device: only --small runs here")
    torch.manual_seed(7)
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    sizes = SMALL if args.small else Sizes()
    bench = Bench(load_kernels("triton", device), device, sizes)
    stages = [("topk", check_topk), ("index_scores", check_scores), ("sparse_mla", check_mla)]
    for name, stage in stages:
        start = time.perf_counter()
        stage(bench)
        print(f"{name}: {len(bench.checks)} checks so far, {time.perf_counter() - start:.1f} s")
    measure(bench)
    report = environment(args.commit) | {
        "small": args.small,
        "checks": bench.checks,
        "timings": bench.timings,
    }
    args.output.write_text(json.dumps(report, indent=1))
    for row in bench.timings:
        print(
            f"{row['op']:13} {row['case']:28} {row['variant']:7} {row['median_us']:9.1f} us"
            f" ({row['p10_us']:.1f} to {row['p90_us']:.1f}), {row['gb_per_s']:.0f} GB/s"
        )


if __name__ == "__main__":
    main()
