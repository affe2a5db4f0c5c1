"""Fills the tables of docs/prefetch.md from JSON results, and draws their plots beside it.

    python benchmarks/prefetch_doc.py            # tables and plots
    python benchmarks/prefetch_doc.py --check    # status 1 when the document is out of date

Marks are those of `doc_tables.py`, names the keys of TABLES.
docs/prefetch.md names the commands that write the results.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import doc_tables
from doc_tables import result as load
from performance_peers import segment_ratios
from prefetch_plots import CUDA, ROOT, VARIANTS, plot, shape_of

from echokv.bench.markdown import table

DOCUMENT = ROOT / "docs" / "prefetch.md"


def source(name: str) -> str:
    """Where a result was measured."""
    result = load(name)
    about = result.get("environment", result)
    machine, day = about["machine"], about["date"][:10]
    made_on = machine["gpus"][0] if machine["gpus"] else machine["cpu"]
    commit, space, more = about["commit"].partition(" ")
    return f"`{name}.json`: {made_on}, {day}, commit `{commit[:12]}`{space}{more}."


def case_of(one: dict[str, Any]) -> str:
    """Requests x context, row and hit rate."""
    return f"{shape_of(one)}, {one['row_bytes']} B, {one['hit']:g}"


def segment_table(name: str) -> str:
    """Microseconds a layer of every variant, and how they compare with no prefetch."""
    rows = []
    for one in load(name)["segments"]:
        times, ratios = one["us"], one["speedup"]
        cells = [f"{times[each]['median']:.1f} ({ratios[each]:.2f}x)" for each in VARIANTS]
        missing = f"{one['rows_a_layer']['off']['recalled']:,.0f}"
        off = f"{times['off']['median']:.1f}"
        rows.append([case_of(one), missing, f"{one['gib']:.2f}", off, *cells])
    header = ("batch x context, row, hit rate", "rows missing", "GiB", "off", *VARIANTS)
    return f"{table(header, rows)}\n\n{source(name)}"


def moved_table() -> str:
    """What moved early, how much in vain, and what was left to recall."""
    rows = []
    for one in load(CUDA)["segments"]:
        cells = []
        for variant in VARIANTS:
            counts = one["rows_a_layer"][variant]
            wasted = counts["prefetched"] - counts["useful"]
            cells.append(f"{counts['useful']:,.0f} + {wasted:,.0f}, {counts['recalled']:,.0f}")
        missing = f"{one['rows_a_layer']['off']['recalled']:,.0f}"
        rows.append([case_of(one), missing, *cells])
    return table(("batch x context, row, hit rate", "rows missing", *VARIANTS), rows)


def parts_table() -> str:
    """Each piece of the segment alone, and what the end of a step takes, once for all layers."""
    result, rows = load(CUDA), []
    for one in result["parts"]:
        ends = [
            each["end_of_step_us"] for each in result["segments"]
            if all(each[key] == one[key] for key in ("batch", "context", "row_bytes"))
        ]  # fmt: skip
        times = one["us"]
        cells = (times["index_scores"], times["topk"], times["select"], max(ends))
        rows.append([f"{shape_of(one)}, {one['row_bytes']} B", *(f"{cell:.1f}" for cell in cells)])
    header = ("batch x context, row", "index scores", "top-k", "select", "end of a step")
    return table(header, rows)


def study_table() -> str:
    """What each way to predict would fetch, both recordings of each hit rate averaged."""
    recordings, rows = list(load("prefetch-study")["recordings"].values()), []
    for number, pool in enumerate(recordings[0]["pools"]):
        pools = [one["pools"][number] for one in recordings]
        hit = sum(one["hit_rate"] for one in pools) / len(pools)
        for name, ways in pool["predictors"].items():
            cells = []
            for way in ways:
                found = [one["predictors"][name][way] for one in pools]
                useful, vain = (
                    sum(one[key] for one in found) / len(found)
                    for key in ("useful_of_missing", "in_vain_a_useful")
                )
                cells.append(f"{useful:.2f}, {vain:.2f}")
            rows.append([f"{hit:.2f}, {name}", *cells])
    header = ("hit rate, prediction", "all of them", "at most k / 8", "learnt limits")
    return f"{table(header, rows)}\n\n{source('prefetch-study')}"


def sketch_table() -> str:
    """What a sketch of the scores makes of the prediction, both recordings averaged."""
    recordings, rows = list(load("prefetch-sketch")["recordings"].values()), []
    for pools in zip(*recordings, strict=True):

        def mean(*path: str, pools: tuple[Any, ...] = pools) -> float:
            values = []
            for pool in pools:
                for key in path:
                    pool = pool[key]
                values.append(pool)
            return sum(values) / len(values)

        hit = mean("hit_rate")
        plain = f"{mean('prediction', 'useful'):.2f}, {mean('prediction', 'in_vain'):.2f}"
        rows.append([f"{hit:.2f}, the prediction alone", plain, "", ""])
        for margin in pools[0]["sketch"]:
            useful, vain, end, listed = (
                mean("sketch", margin, key)
                for key in ("useful", "in_vain", "in_the_end", "candidates_over_k")
            )
            words = f"{hit:.2f}, sketch, candidates from {float(margin):.0%} below"
            rows.append([words, f"{useful:.2f}, {vain:.2f}", f"{end:.2f}", f"{listed:.2f} k"])
    header = ("hit rate, how", "while scores are made: named, in vain", "by the end", "candidates")
    return f"{table(header, rows)}\n\n{source('prefetch-sketch')}"


def decode_table(file: str) -> str:
    """Whole decode steps with prefetch and without."""
    result, rows = load(file), []
    for case in result["cases"]:
        for name, one in case["variants"].items():
            step, moved = one["step_ms"], one["rows_a_layer"]
            ms = f"{step['median']:.2f} ({step['p10']:.2f} to {step['p90']:.2f})"
            gain = ["", ""] if name == "off" else [
                f"{one['gain']:.3f}x", f"{one['saved_us_a_layer']:.1f}"
            ]  # fmt: skip
            counts = (f"{moved[what]:,.0f}" for what in ("early", "in_vain", "recalled"))
            rows.append([f"{shape_of(case)}, {name}", ms, *gain, *counts])
    header = (
        "batch x context, prefetch", "step, ms", "gain", "us a layer", "rows early",
        "early in vain", "recalled",
    )  # fmt: skip
    model = result["model"]
    gib = ", ".join(f"{case['gib']:.1f}" for case in result["cases"])
    words = (
        f"{model['layers']} layers, {model['dense_layers']} of them dense, hit rate"
        f" {result['hit_rate']}, {gib} GiB of host rows."
    )
    return f"{table(header, rows)}\n\n{words} {source(file)}"


def layer_table() -> str:
    """When some kernels of a layer start and end, with prefetch and without."""
    shown = {
        "append_rows": "new rows", "quantise_query": "query quantised",
        "index_scores": "index scores", "prefetching": "index scores that list",
        "fetch_listed": "`fetch_listed`", "topk": "top-k",
        "resident_beside": "recall beside", "flash_fwd_splitkv": "FlashMLA",
    }  # fmt: skip
    sides = {
        f"{shape_of(case)}, {side}": one["layer"]
        for case in load("decode_prefetch-layers")["cases"]
        for side, one in case.get("profile", {}).items()
    }
    rows = []
    for part, words in shown.items():
        cells = []
        for layer in sides.values():
            spans = [row for row in layer if part in row["name"]]
            found = (f"{row['start_us']:.1f} to {row['start_us'] + row['us']:.1f}" for row in spans)
            cells.append(next(found, ""))
        rows.append([words, *cells])
    return f"{table(('us', *sides), rows)}\n\n{source('decode_prefetch-layers')}"


def scores_table() -> str:
    """Index scores alone, without prefetch."""
    columns = {
        "ours": "cuda, query quantised",
        "DeepGEMM": "deep_gemm, query quantised",
        "ours with its quantisation": "cuda",
        "Triton's quantisation, then DeepGEMM": "triton's quantisation, deep_gemm",
        "Triton": "triton",
    }
    rows = [
        [shape_of(one), *(f"{one['median_us'][key]:.1f}" for key in columns.values())]
        for one in load("index_scores")["timings"]
    ]
    return f"{table(('requests x context', *columns), rows)}\n\n{source('index_scores')}"


def beside_table() -> str:
    """A decode step with the guaranteed recall beside the query's products, and inline."""
    cases, rows = load("recall-beside-h200"), []
    for name, words in (("offload", "beside"), ("offload-inline", "where attention asks")):
        one = cases[name]["variants"]["offloaded"]
        cells = []
        for clock in ("step_ms", "device_step_ms"):
            times = one[clock]
            cells.append(f"{times['median']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})")
        rows.append([words, *cells])
    header = ("guaranteed recall", "step of the engine, ms", "the step on the device, ms")
    return f"{table(header, rows)}\n\n{source('recall-beside-h200')}"


def prefill_segment_table() -> str:
    """Prefill's segment without prefetch, in query blocks, and fused."""
    segments = load("prefill_segment")["segments"]
    names = list(dict.fromkeys(name for one in segments for name in one["us"] if name != "off"))
    rows = []
    for one in segments:
        times = {name: spread["median"] for name, spread in one["us"].items()}
        words = f"{one['queries']:,}, {one['selections']}, {one['hit']:g}"
        cells = [
            f"{times[name]:.0f} ({times['off'] / times[name]:.2f}x)" if name in times else ""
            for name in names
        ]
        rows.append([words, f"{one['rows_recalled']:,.0f}", f"{times['off']:.0f}", *cells])
    header = ("queries, selections, hit rate", "rows missing", "off", *names)
    return f"{table(header, rows)}\n\n{source('prefill_segment')}"


def bins_table() -> str:
    """How many scores of prefill rows share the bin of the k-th."""
    result = load("prefill-bins")
    rows = []
    for chunk in result["chunks"]:
        spreads = []
        for how in ("plain", "shifted"):
            low, _, middle, _, high = chunk[how]
            spreads.append(f"{middle:,.0f} ({low:,.0f} to {high:,.0f})")
        rows.append([f"{chunk['first']:,}", *spreads])
    header = ("chunk from token", "no shift, median (5th to 95th percentile)", "shifted")
    return f"{table(header, rows)}\n\n{source('prefill-bins')}"


def goals_table() -> str:
    """The figures to reach of issue 5, and what was."""
    segments = load(CUDA)["segments"]
    fetched = [one for one in segments if one["row_bytes"] == 656]
    ratios = [
        one["median_us"]["cuda, query quantised"] / one["median_us"]["deep_gemm, query quantised"]
        for one in load("index_scores")["timings"]
    ]
    rows = [["scores without prefetch against DeepGEMM's, at most 1.03x",
             f"{min(ratios):.2f}x to {max(ratios):.2f}x"]]  # fmt: skip
    for hit, goal in ((0.5, 1.35), (0.9, 1.6), (0.97, 1.15)):
        best = []
        for variant, row_bytes in itertools.product(VARIANTS[:2], (656, 1152)):
            of_rows = (x for x in segments if (x["hit"], x["row_bytes"]) == (hit, row_bytes))
            one = max(of_rows, key=lambda x: x["speedup"][variant])
            ratio = one["speedup"][variant]
            best.append(f"{variant} {ratio:.2f}x at {shape_of(one)}, {row_bytes} B")
        words = f"segment, hit rate {hit}, at least {goal}x at the best shape"
        rows.append([words, "; ".join(best)])
    missing = [one for one in fetched if one["hit"] < 1]
    lowest = {v: min(one["speedup"][v] for one in missing) for v in VARIANTS}
    words = ", ".join(f"{variant} {ratio:.2f}x" for variant, ratio in lowest.items())
    rows.append(["segment, never below 0.98x at any shape", f"lowest: {words}"])
    largest = {one["hit"]: one["us"] for one in fetched
               if (one["batch"], one["context"]) == (13, 98_304)}  # fmt: skip
    exposed = {
        v: largest[0.9][v]["median"] - largest[1.0]["off"]["median"] for v in ("off", *VARIANTS[:2])
    }
    words = ", ".join(f"{variant} {us:.1f} us" for variant, us in exposed.items())
    rows.append(["recall still exposed at hit rate 0.9, 13 x 98,304, at most 4 us", words])
    for kind, goal in (("random", 1.1), ("overlapping", 1.3)):
        segments = [x for x in load("prefill_segment")["segments"] if x["selections"] == kind]
        found = "; ".join(
            f"{one['queries']}, hit rate {one['hit']:g}: {one['speedup']['fused']:.2f}x of at most"
            f" {one['speedup']['resident']:.2f}x"
            for one in segments
        )
        rows.append([f"prefill segment, 256 and 512 queries, {kind}, at least {goal}x", found])
    words = (
        "segment against SGLang HiSparse's swap-in after DeepGEMM and the fastest public top-k,"
        " 3% / 10% missing, at least 1.5x"
    )
    rows.append([words, segment_ratios()])
    for memory, file in (("managed", "decode_prefetch"), ("pinned", "decode_prefetch-pinned")):
        gains = "; ".join(
            f"{shape_of(case)}: "
            + ", ".join(f"{name} {one['gain']:.3f}x" for name, one in case["variants"].items()
                        if name != "off")
            for case in load(file)["cases"]
        )  # fmt: skip
        rows.append([f"decode step at hit rate 0.95, at least 1.05x; {memory} memory", gains])
    return table(("goal", "measured"), rows, words=2)


TABLES: dict[str, Callable[[], str]] = {
    "prefetch-study": study_table,
    "prefetch-sketch": sketch_table,
    "prefetch-cuda-h200": lambda: segment_table(CUDA),
    "rows moved": moved_table,
    "parts": parts_table,
    "decode_prefetch": lambda: decode_table("decode_prefetch"),
    "decode_prefetch-pinned": lambda: decode_table("decode_prefetch-pinned"),
    "decode_prefetch-few-requests": lambda: decode_table("decode_prefetch-few-requests"),
    "decode_prefetch-light": lambda: decode_table("decode_prefetch-light"),
    "decode_prefetch-few-missing": lambda: decode_table("decode_prefetch-few-missing"),
    "decode layer": layer_table,
    "index_scores": scores_table,
    "recall-beside-h200": beside_table,
    "prefill_segment": prefill_segment_table,
    "prefill-bins": bins_table,
    "goals": goals_table,
}


if __name__ == "__main__":
    sys.exit(doc_tables.main(DOCUMENT, TABLES, __doc__, plot))
