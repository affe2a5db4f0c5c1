"""Writes the tables of docs/performance.md from the JSON files of benchmarks/results.

    python benchmarks/performance_doc.py            # replaces them
    python benchmarks/performance_doc.py --check    # 1 when one isn't what its JSON says

Each lies between two marks in the document, `<!-- table: NAME -->` and `<!-- end -->`; what stands
between them is replaced. A figure that the JSON lacks is left empty. `TABLES` at the end says which
there are.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
MARKS = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", flags=re.S)
HISPARSE = {
    (1, 0.0): 17, (13, 0.0): 19, (64, 0.0): 22, (1, 0.03): 27, (13, 0.03): 33, (64, 0.03): 78,
    (13, 0.1): 57,
}  # fmt: skip
"""Microseconds of SGLang HiSparse's swap-in by batch and share missing: issue 4, another run."""
PCIE_BYTES_PER_US = 55e3
"""Bytes a microsecond that the copy engine moves from host to device, in an earlier run."""
WRITERS = {
    "decode-h200": "decode.py --output-len 16",
    "decode-dense-h200": "decode.py --cases dense",
    "cuda_cache": "cuda_cache.py",
    "index_scores": "index_scores.py",
    "library_kernels": "library_kernels.py",
    "host_reads": "host_reads.py",
    "engine-step-h200": "engine_step.py",
    "cache-h200": "cache.py",
    "kernels-h200": "kernels.py",
}
"""The script in benchmarks/device that writes each result of this page."""
SPANS = {"64 MiB": 2**26, "1 GiB": 2**30, "1.5 GiB": 3 * 2**29, "2 GiB": 2**31, "4 GiB": 2**32}
FAR = 4_722_786_304  # four layers of 1.8M rows
LAUNCH = {"blocks": 132, "threads": 512, "row_bytes": 656}
TOPK = 2048
PAPERS_ROWS = 37  # recalled a layer by 13 requests, in the paper
GOAL_BATCHES = (1, 13, 64)

Row = dict[str, Any]


@functools.cache
def load(name: str) -> Row:
    """A result by its file's name."""
    report: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return report


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Markdown; None is an empty cell, floats have one decimal."""

    def cell(value: object) -> str:
        if value is None:
            return ""
        return f"{value:,.1f}" if isinstance(value, float) else str(value)

    lines = [
        list(header),
        ["---" for _ in header],
        *([cell(value) for value in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find(rows: Iterable[Row], /, **wanted: Any) -> Row | None:
    """The first row that has these values."""
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            return row
    return None


def median(rows: Iterable[Row], /, **wanted: Any) -> float | None:
    """The time of the first row that has these values."""
    row = find(rows, **wanted)
    if row is None:
        return None
    return float(next(row[key] for key in ("median", "median_us", "us") if key in row))


def sources() -> str:
    """Which script made which file, of which commit."""
    lines = []
    for name, script in WRITERS.items():
        report = load(name)
        where = report.get("environment", report)
        if "commit" not in where:
            where = where["machine"]
        note = re.sub(r"^[0-9a-f]{12,}", lambda digits: digits[0][:8], where["commit"])
        if "commit_note" in where:
            note += ", from a working tree"
        lines.append((f"`{name}.json`", f"`{script}`", note))
    return table(("benchmarks/results/", "made by benchmarks/device/", "commit"), lines)


# A decode step at full scale.


def steps() -> str:
    """Step times of both sides, and what their KV takes."""
    report = load("decode-h200")
    scale = report["scale"]
    shapes = {
        "offload": f"{scale['batch']} x {scale['long']:,}",
        "offload-inline": f"{scale['batch']} x {scale['long']:,}, recall inline",
        "light": f"1 x {scale['short']:,}",
    }
    lines = []
    for case, shape in shapes.items():
        variants = report.get(case, {}).get("variants", {})
        for side in ("resident", "offloaded"):
            if side not in variants:
                continue
            one = variants[side]
            taken = one["step_ms"]
            base = variants.get("resident", report["offload"]["variants"]["resident"])
            recalled = sum(one["recalled_rows_by_layer"]) / len(one["recalled_rows_by_layer"])
            hbm = " + ".join(f"{size / 1e9:.2f}" for size in one["hbm_bytes"].values())
            lines.append((
                shape, side, f"{taken['median']:.2f} ({taken['p10']:.2f} to {taken['p90']:.2f})",
                f"{one['device_step_ms']['median']:.2f}",
                "" if side == "resident" else f"{taken['median'] / base['step_ms']['median']:.3f}",
                f"{recalled / one['steps']:,.0f}", hbm,
            ))  # fmt: skip
    header = ("batch x context", "KV", "step, ms (10th to 90th percentile)", "on the device, ms",
              "to resident", "rows recalled a layer a step",
              "HBM, GB: rows + index keys + metadata")  # fmt: skip
    return table(header, lines)


def throughput() -> str:
    """Both sides at equal bytes of HBM."""
    report = load("decode-h200")
    lines = []
    for budget, case in report.get("equal-bytes", {}).items():
        for side in ("resident", "offloaded"):
            one = case["variants"][side]
            selected, recalled = (sum(one[f"{what}_rows_by_layer"])
                                  for what in ("selected", "recalled"))  # fmt: skip
            cold = one["batch"] * TOPK * len(one["selected_rows_by_layer"])
            ratio = case["ratio"]["output_tokens_per_s"] if side == "offloaded" else None
            lines.append((
                budget, side, f"{one['kv_hbm_bytes'] / 1e9:.2f}", one["batch"],
                one["output_tokens"] // one["batch"], one["output_tokens_per_s"],
                None if ratio is None else f"{ratio:.2f}", f"{one['median_step_ms']:.1f}",
                f"{1 - recalled / selected:.3f}" if selected else None,
                f"{1 - (recalled - cold) / (selected - cold):.3f}" if selected else None,
            ))  # fmt: skip
    header = ("budget", "KV", "HBM used, GB", "requests", "tokens each", "output tokens/s",
              "to resident", "median step, ms", "hit rate", "less a cold first step")  # fmt: skip
    return table(header, lines)


def weights() -> str:
    """What the step's weights are, and how long one read of them takes."""
    model = load("decode-h200")["model"]
    rate = next(row["gb_per_s"] for row in library("fp8_experts") if "tokens 13" in row["case"])
    size = model["weight_bytes"] / 1e9
    return (
        f"The weights are {size:.1f} GB of {model['layers']} layers. At {rate / 1e3:.2f} TB/s, what"
        f" the experts' products of 13 tokens reach below, one read of all of them takes"
        f" {size / rate * 1e3:.1f} ms."
    )


# The cache.


def cache_rows() -> list[Row]:
    """Times of make_resident for rows of 656 B, and of gathers."""
    rows: list[Row] = load("cuda_cache").get("make_resident_us 656", [])
    return rows


def resident() -> str:
    """make_resident beside Triton, a bare gather and the peer."""
    rows = cache_rows()
    lines = []
    for one in sorted(
        (row for row in rows if row["variant"] == "cuda" and "batch" in row),
        key=lambda row: (row["batch"], row["recalled_rows"]),
    ):
        case = {name: one[name] for name in ("batch", "missing", "recalled_rows")}
        gather = median(rows, variant="gather", recalled_rows=one["recalled_rows"])
        lines.append((
            one["batch"], f"{one['missing']:.1%}", f"{one['recalled_rows']:,}", one["median"],
            one["p90"], median(rows, variant="triton", **case), gather,
            None if gather is None else one["median"] - gather,
            HISPARSE.get((one["batch"], one["missing"])),
        ))  # fmt: skip
    header = ("batch", "missing", "rows recalled", "CUDA, one launch", "90th percentile",
              "Triton, op by op", "gather", "CUDA less gather",
              "SGLang HiSparse (another run)")  # fmt: skip
    return table(header, lines)


def step() -> str:
    """What the cache adds to a step."""
    rows = load("cuda_cache").get("step_us", [])
    cases = {(row["batch"], row["recalled_rows"]): None for row in rows}
    ways = list(dict.fromkeys(row["victims"] for row in rows))
    lines = [
        (batch, f"{missing:,}", *(median(rows, batch=batch, recalled_rows=missing, victims=way)
                                  for way in ways))
        for batch, missing in sorted(cases)
    ]  # fmt: skip
    names = {
        "beside": "CUDA, victims beside the model",
        "at the start": "CUDA, all slots listed at the start",
        "cuda": "CUDA",
        "triton": "Triton",
    }
    return table(("batch", "rows recalled a layer", *(names[way] for way in ways)), lines)


def append() -> str:
    """New rows."""
    rows = load("cuda_cache").get("append_us", [])
    batches = {row["batch"]: None for row in rows}
    lines = [
        (batch, *(median(rows, batch=batch, variant=name) for name in ("cuda", "triton")))
        for batch in batches
    ]
    return table(("new rows", "CUDA, one launch", "Triton, op by op"), lines)


def victims() -> str:
    """choose_victims by layers and length."""
    report = load("cuda_cache")
    rows = report.get("choose_victims_us", [])
    lines = [(row["layers"], f"{row['num_ready']:,}", row["median"]) for row in rows]
    header = ("layers", f"names listed, of {report['sizes']['device_slots']:,} slots", "us")
    return table(header, lines)


# Kernels.


def topk() -> str:
    """By shape."""
    rows = load("cuda_cache").get("topk_us", [])
    shapes = {(row["rows"], row["width"]): None for row in rows}
    lines = [
        (f"{count} x {width:,}", *(median(rows, rows=count, width=width, variant=name)
                                   for name in ("cuda", "cuda warm", "triton", "torch")))
        for count, width in sorted(shapes)
    ]  # fmt: skip
    return table(("rows x tokens", "CUDA", "CUDA, scores in L2", "Triton", "torch.topk"), lines)


def scores() -> str:
    """Index scores by shape."""
    lines = []
    for row in load("index_scores")["timings"]:
        taken = row["median_us"]
        ours, peer = taken["cuda, query quantised"], taken["deep_gemm, query quantised"]
        lines.append((
            f"{row['rows']} x {row['length']:,}", taken["cuda"],
            taken["triton's quantisation, deep_gemm"], taken["triton"], ours, peer,
            f"{ours / peer:.2f}", f"{row['bytes'] / ours / 1e6:.2f}",
        ))  # fmt: skip
    header = ("rows x tokens", "CUDA", "Triton's quantising + DeepGEMM", "Triton",
              "CUDA, scores alone", "DeepGEMM, scores alone", "CUDA to DeepGEMM",
              "CUDA, TB/s")  # fmt: skip
    return table(header, lines)


def library(op: str) -> list[Row]:
    """Timings of one op of library_kernels.json."""
    return [row for row in load("library_kernels")["timings"] if row["op"] == op]


def sparse_mla() -> str:
    """FlashMLA, plain torch and Triton, by row format and batch."""
    rows = library("sparse_mla")
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        triton, torch = (median(rows, case=case, variant=name) for name in ("triton", "torch"))
        name, batch = case.split(" batch ") if " batch " in case else ("fp8_ds_mla", case[6:])
        lines.append((
            name, batch, median(rows, case=case, variant="flashmla"), torch, triton,
            f"{triton / torch:.2f}" if triton and torch else None,
        ))  # fmt: skip
    header = ("rows", "batch", "FlashMLA", "plain PyTorch", "Triton", "Triton to PyTorch")
    return table(header, lines)


def products() -> str:
    """Block fp8 products, each weight read from HBM, at 1 and 13 tokens."""
    rows = [row for row in library("fp8_linear") if row["variant"] == "triton"]
    lines = []
    for name in dict.fromkeys(row["case"].split(", tokens")[0] for row in rows):
        cells: list[object] = []
        for tokens in (1, 13):
            row = find(rows, case=f"{name}, tokens {tokens}") or {}
            rate = row.get("gb_per_s")
            cells += [row.get("median_us"), f"{rate / 1e3:.2f}" if rate else None]
        size = next(row["bytes"] for row in rows if row["case"].startswith(name))
        lines.append((name, f"{size / 1e6:.1f}", *cells))
    header = ("fp8 weights of", "MB", "1 token, us", "TB/s", "13 tokens, us", "TB/s")
    return table(header, lines)


def experts() -> str:
    """Block fp8 experts."""
    lines = [
        (row["case"], row["variant"], row["median_us"], f"{row['gb_per_s'] / 1e3:.2f}")
        for row in library("fp8_experts")
    ]
    return table(("fp8 experts", "variant", "us", "TB/s of weights"), lines)


# Beside the model, and host memory.


def overlap() -> str:
    """Step and idle time, with async scheduling and without."""
    rows = [row for row in load("engine-step-h200")["steps"] if row["sampling"] == "greedy"]
    lines = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        pair = [find(rows, batch=batch, async_scheduling=on) or {} for on in (True, False)]
        lines.append((batch, *(f"{one[key]:,.0f}" for one in pair
                               for key in ("step_us", "gpu_idle_us", "cpu_us"))))  # fmt: skip
    header = ("batch", "step, async", "GPU idle", "CPU's part", "step, `--no-async-scheduling`",
              "GPU idle", "CPU's part")  # fmt: skip
    return table(header, lines)


def draw() -> str:
    """Sampling by batch."""
    rows = load("engine-step-h200")["draw"]
    ways = dict.fromkeys(row["sampling"] for row in rows)
    lines = [
        (batch, *(f"{(find(rows, batch=batch, sampling=way) or {})['draw_us']:,.0f}"
                  for way in ways))
        for batch in dict.fromkeys(row["batch"] for row in rows)
    ]  # fmt: skip
    return table(("batch", *ways), lines)


def read_us(span: int, rows: int, kind: str = "host_pool", run: int = 1) -> float | None:
    """A bare gather of random rows, `run` neighbours together, from a stretch of memory."""

    def like(row: Row) -> bool:
        return (
            not row.keys() & {"flush", "in_flight"}
            and not row.get("ascending")
            and row.get("run", row.get("group", 1)) == run
            and row["span"] * row.get("layers", 1) == span
        )

    found = filter(like, load("host_reads")["gathers"])
    return median(found, kind=kind, rows=rows, **LAUNCH)


def host_reads() -> str:
    """By the span that rows come from."""
    counts = (512, 2665, 16_384)
    lines = [(name, *(read_us(span, rows) for rows in counts)) for name, span in SPANS.items()]
    lines.append(("4.4 GiB, in runs of two", *(read_us(FAR, rows, run=2) for rows in counts)))
    lines.append(("4 GiB of HBM", *(read_us(2**32, rows, kind="hbm") for rows in counts)))
    return table(("656 B rows from", *(f"{rows:,} rows" for rows in counts)), lines)


def kinds() -> str:
    """By the kind of host memory."""
    names = {
        "host_pool": "ours (`HostPool`)",
        "host_alloc": "cudaHostAlloc",
        "driver_memory": "the driver's, on the host (cuMemCreate)",
        "small_pages": "registered pages of 4 KiB",
        "hugetlb": "hugetlbfs",
    }
    lines = [
        (name, *(read_us(SPANS[span], 2665, kind=kind) for span in ("1 GiB", "4 GiB")))
        for kind, name in names.items()
    ]
    return table(("2,665 rows from", "1 GiB", "4 GiB"), lines)


def pinning() -> str:
    """Seconds to make and register host pools."""
    pin = load("cache-h200")["pinning"]
    size = f"{pin['gib']:.0f} GiB"
    lines: list[tuple[object, ...]] = [
        (size, "ours, first", pin["ours_first"], "cache-h200.json"),
        (size, "ours, again", pin["ours_again"], "cache-h200.json"),
        (size, "`torch.pin_memory`", pin["torch_pin_memory"], "cache-h200.json"),
    ]
    report = load("decode-h200")
    pools = {"offload": report["offload"], "offload-inline": report["offload-inline"]}
    for name, case in {**pools, **report["equal-bytes"]}.items():
        one = case["variants"]["offloaded"]
        what = f"the engine's pools, device pool too ({name})"
        size = f"{one['host_pool_bytes'] / 2**30:.1f} GiB"
        lines.append((size, what, one["pools_s"], "decode-h200.json"))
    return table(("host memory", "", "s", "from"), lines)


# Issue 4's goals.


def cells(values: Iterable[float | None], form: str = ".1f") -> str:
    """Figures with strokes between them."""
    return " / ".join("-" if value is None else format(value, form) for value in values)


def met(values: Iterable[float | None], goals: Iterable[float]) -> str:
    """Whether every figure is known and within its goal."""
    pairs = list(zip(values, goals, strict=True))
    good = [value is not None and value <= goal for value, goal in pairs]
    return "yes" if all(good) else f"no ({sum(good)} of {len(good)})" if any(good) else "no"


def cache_goals() -> list[tuple[str, ...]]:
    """The goals of cache management and top-k."""
    rows, report = cache_rows(), load("cuda_cache")

    def cuda(**case: Any) -> float | None:
        return median(rows, variant="cuda", **case)

    def gather(count: int) -> float | None:
        return median(rows, variant="gather", recalled_rows=count)

    parts = [
        cuda(batch=13, recalled_rows=PAPERS_ROWS),
        median(report["append_us"], variant="cuda", batch=13),
        (median(report["choose_victims_us"], layers=61, num_ready=26_624) or 0.0) / 61,
    ]
    total = sum(part or 0.0 for part in parts)
    none = [cuda(batch=batch, missing=0.0) for batch in GOAL_BATCHES]
    some = [find(rows, variant="cuda", batch=batch, missing=0.03) or {} for batch in GOAL_BATCHES]
    taken = [row.get("median") for row in some]
    floors = [gather(row["recalled_rows"]) for row in some]
    counts = (64, 512, 2665, 16_384)
    recall = [cuda(batch=13, recalled_rows=count) for count in counts]
    over = [(a or 0.0) - (b or 0.0) for a, b in zip(recall, map(gather, counts), strict=True)]
    wide = find(load("cache-h200")["recall"], row_bytes=1152, rows=16_384) or {}
    far = find(load("host_reads")["gathers"], kind="host_pool", rows=16_384, span=FAR,
               **LAUNCH | {"row_bytes": 1152}) or {}  # fmt: skip
    best = find(report["topk_us"], rows=13, width=98_304, variant="cuda") or {}
    warm = median(report["topk_us"], rows=13, width=98_304, variant="cuda warm")
    launch = gather(0)
    return [
        ("cache management, 13 requests, 37 rows a layer, us", "paper 18.8; first draft 15", "7",
         f"{total:.1f} = recall {parts[0]:.1f} + append {parts[1]:.1f} + victims {parts[2]:.1f}",
         met([total], [7]), f"a bare gather of as many rows takes {gather(37):.1f}"),
        ("`make_resident`, nothing missing, batch 1 / 13 / 64, us", "HiSparse 17 / 19 / 22",
         "5 / 6 / 8", cells(none, ".2f"), met(none, (5, 6, 8)),
         f"an empty gather takes {launch:.1f}"),
        ("same, 3% missing, us", "HiSparse 27 / 33 / 78", "8 / 17 / 62", cells(taken),
         met(taken, (8, 17, 62)),
         f"the goals suppose a gather of 4 / 14 / 58; in the same run it took {cells(floors)}"),
        ("recall of 64 / 512 / 2,665 / 16,384 rows, less the bare gather, us", "", "3",
         cells(over), met(over, (3, 3, 3, 3)), "the first version: 8 to 16; see cache operations"),
        ("rows of 1152 B, 16,384, GB/s", "bare gather 50.6", "at least 50",
         f"{wide['GB_per_s']:.1f} (Triton's copy alone, one layer)", "no",
         f"bare gather from four layers {far['GB_per_s']:.1f}; `make_resident` not timed"),
        ("exact top-k 13 x 98,304, us", "torch.topk 85", "20",
         f"{best['median']:.1f} ({warm:.1f} with scores in L2)", met([best["median"]], [20]),
         "the scores are 5.1 MB"),
    ]  # fmt: skip


def decode_goals() -> list[tuple[str, ...]]:
    """The goals of whole steps and of throughput."""
    report, old = load("decode-h200"), load("decode-dense-h200")
    long, light = report["offload"], report["light"]
    base = long["variants"]["resident"]["step_ms"]["median"]
    one = light["variants"]["resident"]["step_ms"]["median"]
    room, small = 0.025 * base, 0.02 * one
    wire = sum(long["variants"]["offloaded"]["recalled_rows_by_layer"]) * 656 / (
        long["variants"]["offloaded"]["steps"] * PCIE_BYTES_PER_US * 1e3
    )  # fmt: skip
    launch = (median(cache_rows(), variant="cuda", batch=1, missing=0.0) or 0.0) * 61e-3
    gather = (median(cache_rows(), variant="gather", recalled_rows=512) or 0.0) * 61e-3
    half = report["equal-bytes"]["9.6 GB"]["ratio"]["output_tokens_per_s"]
    was = cells(old[case]["resident"]["step_ms"]["median"] for case in ("1 x 8192", "13 x 8192"))
    pin = load("cache-h200")["pinning"]
    peer = ("vLLM 0.33, another run: ten dense layers, 4.26 / 4.75 ms at 1 / 13 x 8K; 0.26,"
            " another run: 61 layers, batch 1, 18.7 ms")  # fmt: skip
    ours = (f"not in one run; ten dense layers {was} ms at {old['commit'][:8]}; 61 layers"
            f" {one:.1f} ms at 1 x 4K")  # fmt: skip
    allowed = (f"{room:.2f} ms are allowed; the rows' bytes at PCIe's 55 GB/s are {wire:.2f}, 61"
               f" bare gathers of 512 rows {gather:.2f}: part must overlap. Victims listed at the"
               " start: not measured")  # fmt: skip
    idle = (f"{small:.2f} ms are allowed; 61 `make_resident` with nothing missing are"
            f" {launch:.2f}: part must overlap")  # fmt: skip
    return [
        ("step without offload, to stock vLLM's", peer, "1.05", ours, "not measured",
         "`decode.py --cases dense` and `peer_vllm.py`, in one job"),
        ("step with offload, hit rate 0.98, 13 x 32K, to without", "paper 1.027", "1.025",
         f"{long['ratio']['step_ms']:.3f}", met([long["ratio"]["step_ms"]], [1.025]), allowed),
        ("light load, 1 x 4K, all resident, to without", "paper up to 1.278", "1.02",
         f"{light['ratio']['step_ms']:.3f}", met([light["ratio"]["step_ms"]], [1.02]), idle),
        ("output tokens/s at equal HBM, 27 / 19 / 15 / 9.6 / 5.3 GB, to without", "",
         "2.3 / 2.8 / 2.8 / 2.7 / 2.7", f"- / - / - / {half:.2f} / -", "9.6 GB, in part",
         "16 tokens a request, not 256; the other budgets: `decode.py --cases equal-bytes`"),
        ("same at equal row pools, 325K / 200K / 110K tokens", "paper 2.15 / 3.10 / 4.12",
         "3 / 4 / 6", "-", "not measured", "`decode.py --cases equal-rows`"),
        ("pinning 72 GB, s", "torch 43, rounded to 128 GB", "25",
         f"- (16 GiB: {pin['ours_first']:.1f}; torch {pin['torch_pin_memory']:.1f})",
         "not measured", "`decode.py --cases paper-pools`"),
    ]  # fmt: skip


def goals() -> str:
    """Every goal of issue 4."""
    header = ("what", "reference", "goal", "measured", "met", "floor, or what is missing")
    return table(header, [*cache_goals(), *decode_goals()])


TABLES: dict[str, Callable[[], str]] = {
    "sources": sources,
    "steps": steps,
    "throughput": throughput,
    "weights": weights,
    "resident": resident,
    "append": append,
    "victims": victims,
    "step": step,
    "topk": topk,
    "scores": scores,
    "sparse mla": sparse_mla,
    "products": products,
    "experts": experts,
    "overlap": overlap,
    "draw": draw,
    "host reads": host_reads,
    "host memory": kinds,
    "pinning": pinning,
    "goals": goals,
}


def main() -> int:
    """Replace every table; 1 when a mark names none, or when one to check is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    text = DOCUMENT.read_text()
    marks = [match[2] for match in MARKS.finditer(text)]
    unknown = [name for name in marks if name not in TABLES]
    if unknown:
        print(f"{DOCUMENT}: no such table: {unknown}", file=sys.stderr)
        return 1
    stale = [match[2] for match in MARKS.finditer(text) if _filled(match) != match[0]]
    if not options.check:
        DOCUMENT.write_text(MARKS.sub(_filled, text))
    print(f"{DOCUMENT}: {len(marks)} tables, {len(stale)} out of date {stale or ''}".rstrip())
    return 1 if options.check and stale else 0


def _filled(match: re.Match[str]) -> str:
    return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"


if __name__ == "__main__":
    sys.exit(main())
