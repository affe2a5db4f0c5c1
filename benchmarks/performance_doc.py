"""Writes the tables of docs/performance.md from the JSON files of benchmarks/results.

    python benchmarks/performance_doc.py            # replaces them
    python benchmarks/performance_doc.py --check    # 1 when one isn't what its JSON says

Marks are those of `doc_tables.py`. A figure that the JSON lacks is left empty. `TABLES` at the end
says which there are.
"""

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import doc_tables
import performance_decode as decode
import performance_peers as peers
from performance_goals import cache_rows, goals, recall_parts
from performance_tables import Row, decode_files, find, load, median

from echokv.bench.markdown import table

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
WRITERS = {
    "decode-dense-h200": "decode.py --cases dense slice --layers 10",
    "peer-vllm-h200": "peer_vllm.py",
    "peer-sglang-h200": "peer_sglang.py",
    "peer-sglang-managed-h200": "peer_sglang.py --their-memory managed",
    "cache_ops": "cache_ops.py",
    "cuda_cache": "cuda_cache.py",
    "index_scores": "index_scores.py",
    "prefill_parts": "prefill_parts.py",
    "prefill": "prefill.py",
    "library_kernels": "library_kernels.py",
    "host_reads": "host_reads.py",
    "engine-step-h200": "engine_step.py",
    "cache-h200": "cache.py",
    "kernels-h200": "kernels.py",
}
"""The script in benchmarks/device that writes each result of this page."""
PREFILL_SCORES = {
    "tiled": "CUDA",
    "tiled, query quantised": "CUDA, scores alone",
    "cuda, query quantised": "row by row, scores alone",
    "deep_gemm, contiguous": "DeepGEMM, contiguous keys",
    "gathered, deep_gemm, contiguous": "same, and the gathering",
    "deep_gemm, paged": "DeepGEMM, paged",
    "triton": "Triton",
}
"""Variants of prefill_parts.json; DeepGEMM's are scores alone."""
SPANS = {
    "64 MiB": 2**26, "1 GiB": 2**30, "2 GiB": 2**31, "4 GiB": 2**32, "12 GiB": 3 * 2**32,
}  # fmt: skip
KINDS_OF_MEMORY = {
    "managed": "managed, as `HostPool` has it",
    "pinned": "huge pages of ours, registered",
    "small_pages": "pages of 4 KiB, registered",
    "host_alloc": "cudaHostAlloc",
    "driver_memory": "the driver's, on the host (cuMemCreate)",
    "hbm": "HBM",
}
"""Of host_reads.json."""
TOPK = 2048
SPANS_OF_RECALL = (1.0, 4.4)  # GiB of host rows, four layers in turn


def _commit(report: Row) -> str:
    """Of the code that a result measured: ours, where it is a peer's."""
    where = report.get("environment", report)
    if "commit" not in where and "machine" not in where:
        cases = [case for engine in report.values() for case in engine["cases"].values()]
        where = {"commit": next(case["our_commit"] for case in cases if "our_commit" in case)}
    elif "commit" not in where:
        where = where["machine"]
    note = re.sub(r"^[0-9a-f]{12,}", lambda digits: digits[0][:8], where["commit"])
    return f"{note}, from a working tree" if "commit_note" in where else note


def sources() -> str:
    """Which script made which file, of which commit."""
    lines = []
    for name, script in {**dict.fromkeys(decode_files(), "decode.py"), **WRITERS}.items():
        report = load(name)
        if not report:
            continue
        lines.append((f"`{name}.json`", f"`{script}`", _commit(report)))
    return table(("benchmarks/results/", "made by benchmarks/device/", "commit"), lines, words=3)


# The cache.


def resident() -> str:
    """make_resident beside Triton and a bare gather, by what the rows come from."""
    rows = [row for row in cache_rows() if not row["selection_in_l2"]]
    lines = []
    cases = {(row["batch"], row["recalled_rows"]): None for row in rows}
    for batch, count in sorted(cases):
        case = [row for row in rows if (row["batch"], row["recalled_rows"]) == (batch, count)]
        cells: list[object] = []
        for gib in SPANS_OF_RECALL:
            near = [row for row in case if round(row["gib"], 1) == gib]
            ours = find(near, variant="cuda") or {}
            cells += [ours.get("median"), ours.get("p90"), median(near, variant="gather")]
        triton = median(case, variant="triton")
        lines.append((batch, f"{count:,}", f"{count / batch / TOPK:.1%}", *cells, triton))
    columns = [
        f"{name}, {gib:g} GiB"
        for gib in SPANS_OF_RECALL
        for name in ("CUDA", "90th percentile", "gather")
    ]
    header = ("batch", "rows recalled", "missing", *columns, "Triton, op by op, 1 GiB")
    return table(header, lines)


def step() -> str:
    """What the cache adds to a step."""
    rows = load("cache_ops").get("step_us", [])
    cases = {(row["batch"], row["recalled_rows"], row["gib"]): None for row in rows}
    names = {
        "beside": "beside the products, as in the engine",
        "inline": "one after the other",
        "begin alone": "of that, `begin_step`",
    }
    ways = [way for way in names if find(rows, way=way)]
    lines = [
        (batch, f"{missing:,}", f"{gib:.1f}",
         *(median(rows, batch=batch, recalled_rows=missing, gib=gib, way=way) for way in ways))
        for batch, missing, gib in sorted(cases)
    ]  # fmt: skip
    columns = (names[way] for way in ways)
    return table(("batch", "rows recalled a layer", "GiB of host rows", *columns), lines)


def append() -> str:
    """New rows."""
    rows = load("cache_ops").get("append_us", [])
    batches = {row["batch"]: None for row in rows}
    lines = [
        (batch, *(median(rows, batch=batch, variant=name) for name in ("cuda", "triton")))
        for batch in batches
    ]
    return table(("new rows", "CUDA, one launch", "Triton, op by op"), lines)


def victims() -> str:
    """choose_victims by layers."""
    rows = load("cache_ops").get("choose_victims_us", [])
    names = {"anew": "made anew", "kept": "kept, as in most steps"}
    lines = [
        (row["layers"], f"{row['slots']:,}", names.get(row["lists"], row["lists"]), row["median"])
        for row in rows
    ]
    return table(("layers", "slots a layer", "lists", "us"), lines, words=3)


# Kernels.


def topk() -> str:
    """By shape."""
    rows = load("cuda_cache").get("topk_us", [])
    shapes = {(row["rows"], row["width"]): None for row in rows}
    names = {
        "CUDA": "cuda",
        "CUDA, scores in L2": "cuda warm",
        "CUDA, rows named": "cuda, named",
        "Triton": "triton",
        "torch.topk": "torch",
    }
    lines = [
        (f"{count} x {width:,}", *(median(rows, rows=count, width=width, variant=name)
                                   for name in names.values()))
        for count, width in sorted(shapes)
    ]  # fmt: skip
    return table(("rows x tokens", *names), lines)


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


def prefill_scores() -> str:
    """Index scores of a prefill, microseconds and TFLOP/s."""
    lines = []
    for row in load("prefill_parts")["shapes"]:
        cells = [
            f"{row['us'][name]:,.0f} ({row['tflops'][name]:,.0f})" if name in row["us"] else None
            for name in PREFILL_SCORES
        ]
        shape = f"{row['queries']:,} x {row['context']:,}"
        lines.append((shape, *cells, f"{row['us']['topk']:,.0f}"))
    return table(("queries x context", *PREFILL_SCORES.values(), "top-k"), lines)


def prefill() -> str:
    """A long prompt, offloaded and resident."""
    report = load("prefill")
    chunk, pool = report["scale"]["chunk"], report["scale"]["device_pool"]
    whole = report["scale"]["prompt"] // chunk
    lines = []
    for name, row in report["variants"].items():
        within, past = (
            statistics.median(row["chunk_ms"][part])
            for part in (slice(1, pool // chunk), slice(pool // chunk + 1, whole))
        )
        lines.append((
            name, f"{row['first_token_s']:.2f}", f"{row['prompt_tokens_per_s']:,.0f}",
            f"{within:.1f}", f"{past:.1f}", f"{sum(row['recalled_rows_by_layer']):,}",
        ))  # fmt: skip
    header = ("", "first token, s", "tokens/s", f"a chunk up to {pool:,} tokens, ms",
              "past them, ms", "rows recalled")  # fmt: skip
    return table(header, lines)


def prefill_cached() -> str:
    """A chunk that ends a cached prompt, whose rows are in the device pool or not."""
    both = load("prefill")["cold_prefix"]
    lines = []
    for name, words in (("warm", "in the device pool"), ("cold", "in host memory alone")):
        for prefetch, found in both.items():
            ms = sorted(found["ms"][name])
            lines.append((
                f"{words}, prefetch {prefetch}",
                f"{statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f})",
                f"{statistics.median(found['rows_recalled'][name]):,.0f}",
                f"{statistics.median(found['rows_prefetched'][name]):,.0f}",
            ))  # fmt: skip
    tokens = f"{both['off']['context']:,} tokens cached"
    return table((tokens, "chunk, ms (least to most)", "rows recalled", "rows moved early"), lines)


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


def experts() -> str:
    """Block fp8 experts."""
    lines = [
        (row["case"], row["variant"], row["median_us"], f"{row['gb_per_s'] / 1e3:.2f}")
        for row in library("fp8_experts")
    ]
    return table(("fp8 experts", "variant", "us", "TB/s of weights"), lines, words=2)


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


def read_us(kind: str, span: int, rows: int) -> float | None:
    """A bare gather of random rows of 656 B from a stretch of memory, each on its own."""
    found = load("host_reads")["gathers"]
    return median(found, kind=kind, span=span, rows=rows, row_bytes=656, blocks=132, window=None)


def host_reads() -> str:
    """By the span that rows come from."""
    counts, kinds = (512, 2665, 16_384), ("managed", "pinned")
    lines = [
        (name, *(read_us(kind, span, rows) for kind in kinds for rows in counts))
        for name, span in SPANS.items()
    ]
    header = ("656 B rows from", *(f"{kind}, {rows:,} rows" for kind in kinds for rows in counts))
    return table(header, lines)


def kinds() -> str:
    """By the kind of memory."""
    spans = ("1 GiB", "4 GiB", "12 GiB")
    lines = [
        (name, *(read_us(kind, SPANS[span], 2665) for span in spans))
        for kind, name in KINDS_OF_MEMORY.items()
    ]
    return table(("2,665 rows from", *spans), lines)


def windows() -> str:
    """By how close together eight rows of 512 B lie."""
    found = [row for row in load("host_reads")["gathers"] if row["row_bytes"] == 512]
    sizes = dict.fromkeys(row["window"] for row in found)
    lines = [
        (f"{size >> 10:,} KiB" if size else "12 GiB",
         *(median(found, kind=kind, window=size) for kind in ("managed", "pinned")))
        for size in sizes
    ]  # fmt: skip
    return table(("eight rows of 512 B each within", "managed", "pinned"), lines)


def beside_hbm() -> str:
    """A gather and a read of HBM, alone and together."""
    lines = [
        (row["kind"], *(row["us"][what] for what in ("gather", "read", "both")))
        for row in load("host_reads")["beside"]
    ]
    header = ("host memory", "gather of 2,665 rows", "read of 168 MB of HBM", "both at once")
    return table(header, lines)


def versions() -> str:
    """What made an earlier version's large recalls slow."""
    rows = [row for row in load("recall_versions")["timings"] if row["batch"] == 13]
    names = list(dict.fromkeys(row["variant"] for row in rows))
    lines = [
        (f"{count:,}", *(median(rows, misses=count, variant=name) for name in names))
        for count in dict.fromkeys(row["misses"] for row in rows)
    ]
    return table(("rows recalled", *names), lines)


def pinning() -> str:
    """Seconds to make and register host pools."""
    pin = load("cache-h200")["pinning"]
    size = f"{pin['gib']:.0f} GiB"
    lines: list[tuple[object, ...]] = [
        (size, "ours, first", pin["ours_first"], "cache-h200.json"),
        (size, "ours, again", pin["ours_again"], "cache-h200.json"),
        (size, "`torch.pin_memory`", pin["torch_pin_memory"], "cache-h200.json"),
    ]
    lines += decode.pinned()
    return table(("host memory", "", "s", "from"), lines, words=4)


TABLES: dict[str, Callable[[], str]] = {
    "sources": sources,
    "steps": decode.steps,
    "throughput": decode.throughput,
    "row pools": decode.row_pools,
    "weights": decode.weights,
    "vllm": peers.vllm,
    "swap in": peers.swap_in,
    "segment": peers.segment,
    "segment managed": peers.segment_managed,
    "topk peers": peers.topk,
    "resident": resident,
    "versions": versions,
    "append": append,
    "victims": victims,
    "step": step,
    "topk": topk,
    "scores": scores,
    "prefill scores": prefill_scores,
    "prefill": prefill,
    "prefill cached": prefill_cached,
    "sparse mla": sparse_mla,
    "experts": experts,
    "overlap": overlap,
    "draw": draw,
    "host reads": host_reads,
    "host memory": kinds,
    "windows": windows,
    "beside HBM": beside_hbm,
    "pinning": pinning,
    "goals": goals,
    "recall parts": recall_parts,
}


if __name__ == "__main__":
    sys.exit(doc_tables.main(DOCUMENT, TABLES, __doc__))
