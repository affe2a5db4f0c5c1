"""Fills the tables of docs/prefetch.md from JSON results, and draws their plots beside it.

    python benchmarks/prefetch_doc.py            # tables and plots
    python benchmarks/prefetch_doc.py --check    # status 1 when the document is out of date

Each table stands between `<!-- NAME -->` and `<!-- end NAME -->`, where NAME is a key of TABLES.
docs/prefetch.md names the commands that write the results.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from echokv.bench.plots import figure, save_figure

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "prefetch.md"
PLOTS = ROOT / "docs" / "plots" / "prefetch"
RESULTS = ROOT / "benchmarks" / "results"

PORTABLE, CUDA = "prefetch-portable-h200", "prefetch-cuda-h200"
VARIANTS = ("perfect", "on", "worst")
SCORING_VARIANTS = ("on", "on, late", "on, late x2")
SCORING_WORDS = {
    "on": "while scoring",
    "on, late": "and beside the top-k",
    "on, late x2": "both, twice the budget",
}
GATHERED = (512, 2665, 16_384)
MIB = 2**20


@cache
def load(name: str) -> dict[str, Any]:
    """One result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def grid(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table whose first column is words and whose others are numbers."""
    titles = list(header)
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def source(name: str) -> str:
    """Where a result was measured."""
    result = load(name)
    about = result.get("environment", result)
    gpu, day = about["machine"]["gpus"][0], about["date"][:10]
    commit, space, more = about["commit"].partition(" ")
    return f"`{name}.json`: {gpu}, {day}, commit `{commit[:12]}`{space}{more}."


def shape_of(one: dict[str, Any]) -> str:
    """Requests x context."""
    batch, context = one.get("batch", one.get("rows")), one.get("context", one.get("length"))
    return f"{batch} x {context:,}"


def segment_table(name: str) -> str:
    """Microseconds a layer of every variant, and how they compare with no prefetch."""
    rows = []
    for one in load(name)["segments"]:
        times, ratios = one["us"], one["speedup"]
        cells = [f"{times[each]['median']:.1f} ({ratios[each]:.2f}x)" for each in VARIANTS]
        missing = f"{one['rows_a_layer']['off']['recalled']:,.0f}"
        off = f"{times['off']['median']:.1f}"
        rows.append([f"{shape_of(one)}, {one['hit']}", missing, off, *cells])
    header = ("batch x context, hit rate", "rows missing", "off", *VARIANTS)
    return f"{grid(header, rows)}\n\n{source(name)}"


def moved_table() -> str:
    """What moved early with the CUDA kernel, how much in vain, and what was left to recall."""
    rows = []
    for one in load(CUDA)["segments"]:
        cells = []
        for variant in VARIANTS:
            counts = one["rows_a_layer"][variant]
            wasted = counts["prefetched"] - counts["useful"]
            cells.append(f"{counts['useful']:,.0f} + {wasted:,.0f}, {counts['recalled']:,.0f}")
        missing = f"{one['rows_a_layer']['off']['recalled']:,.0f}"
        rows.append([f"{shape_of(one)}, {one['hit']}", missing, *cells])
    return grid(("batch x context, hit rate", "rows missing", *VARIANTS), rows)


def parts_table() -> str:
    """Each piece of the segment alone, at hit rate 0.9."""
    rows = []
    for name in (PORTABLE, CUDA):
        for one in load(name)["parts"]:
            times = one["us"]
            beside = times["select"] - times["index_scores"]
            fetching = times.get("fetch_ahead") or times["candidates"] + times["prefetch"]
            cells = (times["index_scores"], times["topk"], beside, fetching)
            rows.append([f"{one['backend']}, {shape_of(one)}", *(f"{cell:.1f}" for cell in cells)])
    header = ("batch x context", "index scores", "top-k", "what it runs beside", "prefetch alone")
    return grid(header, rows)


def scoring_table() -> str:
    """Fetching inside the scoring kernel; exposed: above the time with everything resident."""
    rows = []
    for one in load("index_prefetch")["segments"]:
        times = one["median_us"]
        resident = times["off, all resident"]
        for hit in (0.5, 0.9, 0.97):
            off = times[f"off {hit}"]
            taken = [times[f"{variant} {hit}"] for variant in SCORING_VARIANTS]
            cells = [f"{each:.1f} ({off / each:.2f}x)" for each in taken]
            exposed = f"{off - resident:.1f}, {taken[1] - resident:.1f}"
            name = f"{shape_of(one)}, {one['row_bytes']} B, {hit}"
            rows.append([name, f"{off:.1f}", *cells, exposed])
        alone = f"{times['on, all resident']:.1f} ({resident / times['on, all resident']:.2f}x)"
        name = f"{shape_of(one)}, {one['row_bytes']} B, 1"
        rows.append([name, f"{resident:.1f}", alone, "", "", ""])
    words = (SCORING_WORDS[each] for each in SCORING_VARIANTS)
    header = ("batch x context, row, hit rate", "off", *words, "exposed: off, with")
    return f"{grid(header, rows)}\n\n{source('index_prefetch')}"


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
    return f"{grid(('requests x context', *columns), rows)}\n\n{source('index_scores')}"


def gathers() -> dict[int, dict[int, dict[str, Any]]]:
    """Plain gathers of 656 B rows from a host pool: span, rows, what was measured."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for one in load("host_reads")["gathers"]:
        plain = not {"group", "flush", "in_flight"} & one.keys()
        usual = (one["kind"], one["row_bytes"], one["blocks"]) == ("host_pool", 656, 132)
        if plain and usual and one["span"] % (64 * MIB) == 0 and one["rows"] in GATHERED:
            found.setdefault(one["span"], {})[one["rows"]] = one
    return found


def gather_table() -> str:
    """Microseconds and GB/s by how much host memory rows come from."""
    rows = [
        [
            f"{span // MIB:,} MiB",
            *(f"{by[rows]['us']:.1f} ({by[rows]['GB_per_s']:.0f})" for rows in GATHERED),
        ]
        for span, by in gathers().items()
    ]
    header = ("rows come from", *(f"{n:,} rows, us (GB/s)" for n in GATHERED))
    return f"{grid(header, rows)}\n\n{source('host_reads')}"


def beside_table() -> str:
    """A decode step with the guaranteed recall beside the query's products, and inline."""
    cases, rows = load("decode-h200"), []
    for name, words in (("offload", "beside"), ("offload-inline", "where attention asks")):
        one = cases[name]["variants"]["offloaded"]
        cells = []
        for clock in ("step_ms", "device_step_ms"):
            times = one[clock]
            cells.append(f"{times['median']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})")
        rows.append([words, *cells])
    header = ("guaranteed recall", "step of the engine, ms", "the step on the device, ms")
    return f"{grid(header, rows)}\n\n{source('decode-h200')}"


def goals_table() -> str:
    """The figures to reach of issue 5, and what was."""
    fetched, scored = load(CUDA)["segments"], load("index_prefetch")["segments"]
    ratios = [
        one["median_us"]["cuda, query quantised"] / one["median_us"]["deep_gemm, query quantised"]
        for one in load("index_scores")["timings"]
    ]
    rows = [["scores without prefetch against DeepGEMM's, at most 1.03x",
             f"{min(ratios):.2f}x to {max(ratios):.2f}x: reached"]]  # fmt: skip
    for hit, goal in ((0.5, 1.35), (0.9, 1.6), (0.97, 1.15)):
        best = []
        for variant in ("perfect", "on"):
            one = max((x for x in fetched if x["hit"] == hit), key=lambda x: x["speedup"][variant])
            best.append(f"{variant} {one['speedup'][variant]:.2f}x at {shape_of(one)}")
        for variant in SCORING_VARIANTS[1:]:
            ratio, one = max(
                ((x["median_us"][f"off {hit}"] / x["median_us"][f"{variant} {hit}"], x)
                 for x in scored if x["row_bytes"] == 656),
                key=lambda pair: pair[0],
            )  # fmt: skip
            budget = "scoring, twice the budget" if "x2" in variant else "scoring"
            best.append(f"{budget} {ratio:.2f}x at {shape_of(one)}")
        words = f"segment, hit rate {hit}, at least {goal}x at the best shape"
        rows.append([words, "; ".join(best)])
    lowest = {v: min(one["speedup"][v] for one in fetched) for v in VARIANTS}
    words = ", ".join(f"{variant} {ratio:.2f}x" for variant, ratio in lowest.items())
    rows.append(["segment, never below 0.98x at any shape", f"lowest: {words}"])
    times = scored[0]["median_us"]
    before, after = (
        times[label] - times["off, all resident"] for label in ("off 0.9", "on, late 0.9")
    )
    words = f"recall still exposed at hit rate 0.9, {shape_of(scored[0])}, at most 4 us"
    rows.append([words, f"scoring {after:.1f} us, of {before:.1f} us without prefetch"])
    return grid(("goal", "measured"), rows).replace("---:", "---")


def plot_segments() -> None:
    """Speed-up by hit rate, a panel a context, a file a batch; dashed: the portable version."""
    for batch in (13, 1):
        drawing, panels = figure(columns=2)
        for axes, context in zip(panels, (98_304, 32_768), strict=True):
            for name, line, words in ((CUDA, "-", "CUDA"), (PORTABLE, "--", "portable")):
                chosen = [
                    one for one in load(name)["segments"]
                    if (one["batch"], one["context"]) == (batch, context)
                ]  # fmt: skip
                for color, variant in enumerate(VARIANTS):
                    axes.plot(
                        [f"{one['hit']}" for one in chosen],
                        [one["speedup"][variant] for one in chosen], line, color=f"C{color}",
                        marker="o", markersize=4, label=f"{variant}, {words}",
                    )  # fmt: skip
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set(xlabel="hit rate", ylabel="speed-up", ylim=(0.6, 1.4))
            axes.set_title(f"indexer, top-k and recall, {batch} x {context:,}")
        panels[0].legend(fontsize=7, handlelength=4)
        save_figure(drawing, PLOTS / f"segment-{batch}.png")


def plot_scoring() -> None:
    """Speed-up of fetching while scoring, by hit rate."""
    drawing, panels = figure(columns=2)
    for axes, variant in zip(panels, SCORING_VARIANTS[1:], strict=True):
        for one in load("index_prefetch")["segments"]:
            times, hits = one["median_us"], (0.5, 0.9, 0.97)
            ratios = [times[f"off {hit}"] / times[f"{variant} {hit}"] for hit in hits]
            label = f"{shape_of(one)}, {one['row_bytes']} B"
            axes.plot([str(hit) for hit in hits], ratios, marker="o", label=label)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xlabel="hit rate", ylabel="speed-up", ylim=(0.8, 1.4))
        axes.set_title("fetching while scoring" + (", twice the budget" if "x2" in variant else ""))
    panels[0].legend(fontsize=7)
    save_figure(drawing, PLOTS / "scoring.png")


def plot_moved() -> None:
    """Rows a layer that move, by when and whether in vain."""
    drawing, panels = figure(columns=2)
    shapes = [one for one in load(CUDA)["segments"] if one["batch"] == 13 and one["hit"] != 0.5]
    for axes, context in zip(panels, (98_304, 32_768), strict=True):
        bars = [(one, v) for one in shapes if one["context"] == context for v in ("off", *VARIANTS)]
        counts = [one["rows_a_layer"][v] for one, v in bars]
        parts = {
            "early, selected": [each["useful"] for each in counts],
            "recalled after the top-k": [each["recalled"] for each in counts],
            "early, in vain": [each["prefetched"] - each["useful"] for each in counts],
        }
        bottom = [0.0] * len(bars)
        names = [f"{v}\n{one['hit']}" for one, v in bars]
        for label, heights in parts.items():
            axes.bar(names, heights, bottom=bottom, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.set(ylabel="rows a layer", ylim=(0, 4800), xlabel="variant, hit rate")
        axes.set_title(f"rows that move, 13 x {context:,}")
    panels[0].legend(fontsize=7)
    save_figure(drawing, PLOTS / "moved.png")


def plot_gathers() -> None:
    """How fast random rows come from host memory."""
    drawing, (axes,) = figure(columns=1)
    found = gathers()
    for rows in GATHERED:
        rates = [by[rows]["GB_per_s"] for by in found.values()]
        axes.plot([span / 2**30 for span in found], rates, marker="o", label=f"{rows:,} rows")
    axes.set(xlabel="GiB of host memory that rows come from", ylabel="GB/s", ylim=(0, 50))
    axes.set_title("random rows of 656 B over PCIe")
    axes.legend()
    save_figure(drawing, PLOTS / "host-reads.png")


TABLES: dict[str, Callable[[], str]] = {
    "prefetch-portable-h200": lambda: segment_table(PORTABLE),
    "prefetch-cuda-h200": lambda: segment_table(CUDA),
    "rows moved": moved_table,
    "parts": parts_table,
    "index_prefetch": scoring_table,
    "index_scores": scores_table,
    "host_reads": gather_table,
    "decode-h200": beside_table,
    "goals": goals_table,
}


def main() -> int:
    """Rewrite the document and draw, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; say if it would")
    check = parser.parse_args().check
    before = text = DOCUMENT.read_text()
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        head, found, rest = text.partition(start)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            print(f"{DOCUMENT} has no place for {name}: {start} ... {end}", file=sys.stderr)
            return 1
        text = f"{head}{start}\n{table()}\n{end}{tail}"
    if check:
        if text != before:
            print(f"{DOCUMENT} is out of date: python benchmarks/prefetch_doc.py", file=sys.stderr)
        return int(text != before)
    DOCUMENT.write_text(text)
    for draw in (plot_segments, plot_scoring, plot_moved, plot_gathers):
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
