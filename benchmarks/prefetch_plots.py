"""The plots of docs/prefetch.md, from JSON results; `prefetch_doc.py` draws them.

In the manner of the paper's figures 4, 9, 18, 19 and 20, of this GPU.
"""

from pathlib import Path
from typing import Any

from doc_tables import result as load

from echokv.bench.plots import figure, save_figure

ROOT = Path(__file__).parent.parent
PLOTS = ROOT / "docs" / "plots" / "prefetch"

CUDA = "prefetch-cuda-h200"
VARIANTS = ("perfect", "on", "worst")


def shape_of(one: dict[str, Any]) -> str:
    """Requests x context."""
    batch, context = one.get("batch", one.get("rows")), one.get("context", one.get("length"))
    return f"{batch} x {context:,}"


def plot_selecting_and_recalling() -> None:
    """What selecting takes, by context, and what missing rows add, by hit rate."""
    found = [one for one in load(CUDA)["segments"] if one["row_bytes"] == 656]
    parts = [one for one in load(CUDA)["parts"] if one["row_bytes"] == 656]
    drawing, (selecting, recalling) = figure(columns=2)
    longest = max(one["context"] for one in found)
    for batch in sorted({one["batch"] for one in found}):
        mine = sorted((x for x in parts if x["batch"] == batch), key=lambda one: one["context"])
        selecting.plot(
            [f"{one['context']:,}" for one in mine], [one["us"]["select"] for one in mine],
            marker="o", markersize=4, label=f"{batch} requests" if batch > 1 else "1 request",
        )  # fmt: skip
        off = {one["hit"]: one["us"]["off"]["median"] for one in found
               if (one["batch"], one["context"]) == (batch, longest)}  # fmt: skip
        rates = sorted(rate for rate in off if rate < 1)
        recalling.plot(
            [f"{rate:g}" for rate in rates], [off[rate] - off[1.0] for rate in rates],
            marker="o", markersize=4,
        )  # fmt: skip
    selecting.set(xlabel="context", ylabel="us a layer", ylim=(0, None))
    selecting.set_title("index scores and top-k")
    selecting.legend(fontsize=7)
    recalling.set(xlabel="hit rate", ylabel="us a layer more", yscale="log")
    recalling.set_title(f"recall, less that of hit rate 1; contexts of {longest:,}")
    save_figure(drawing, PLOTS / "selecting-and-recalling.png")


def plot_segments() -> None:
    """Speed-up by hit rate, a panel a context, a file a batch."""
    found = [one for one in load(CUDA)["segments"] if one["row_bytes"] == 656]
    for batch in sorted({one["batch"] for one in found}):
        contexts = sorted({one["context"] for one in found if one["batch"] == batch})
        drawing, panels = figure(columns=len(contexts))
        for axes, context in zip(panels, contexts, strict=True):
            chosen = [one for one in found if (one["batch"], one["context"]) == (batch, context)]
            for variant in VARIANTS:
                axes.plot(
                    [f"{one['hit']:g}" for one in chosen],
                    [one["speedup"][variant] for one in chosen],
                    marker="o", markersize=4, label=variant,
                )  # fmt: skip
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.set(xlabel="hit rate", ylabel="speed-up", ylim=(0.7, 1.9))
            axes.set_title(f"indexer, top-k and recall, {batch} x {context:,}")
        panels[0].legend(fontsize=7)
        save_figure(drawing, PLOTS / f"segment-{batch}.png")


def plot_moved() -> None:
    """Rows a layer that move, by when and whether in vain."""
    shapes = [
        one for one in load(CUDA)["segments"]
        if one["batch"] == 13 and one["row_bytes"] == 656 and one["hit"] in (0.9, 0.97)
    ]  # fmt: skip
    contexts = sorted({one["context"] for one in shapes})
    drawing, panels = figure(columns=len(contexts))
    for axes, context in zip(panels, contexts, strict=True):
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
        axes.set(ylabel="rows a layer", xlabel="variant, hit rate")
        axes.tick_params(axis="x", labelsize=6)
        axes.set_title(f"rows that move, 13 x {context:,}")
    panels[0].legend(fontsize=7)
    save_figure(drawing, PLOTS / "moved.png")


def plot_gathers() -> None:
    """How fast random rows come from host memory, by its kind."""
    drawing, (axes,) = figure(columns=1)
    found = [
        one for one in load("host_reads")["gathers"]
        if (one["rows"], one["row_bytes"], one["blocks"]) == (2665, 656, 132)
    ]  # fmt: skip
    for kind in ("managed", "pinned"):
        mine = [one for one in found if one["kind"] == kind]
        axes.plot(
            [one["span"] / 2**30 for one in mine], [one["GB_per_s"] for one in mine], marker="o",
            label=f"{kind} memory",
        )  # fmt: skip
    axes.set(xlabel="GiB of host memory that rows come from", ylabel="GB/s", ylim=(0, 50))
    axes.set_title("2,665 random rows of 656 B over PCIe")
    axes.legend()
    save_figure(drawing, PLOTS / "host-reads.png")


def plot_steps() -> None:
    """How much faster whole decode steps are."""
    cases = sorted(load("decode_prefetch")["cases"], key=lambda one: -one["batch"])
    names = [name for name in cases[0]["variants"] if name != "off"]
    drawing, (axes,) = figure(columns=1)
    for place, name in enumerate(names):
        gains = [100 * (one["variants"][name]["gain"] - 1) for one in cases]
        at = [
            which + (place - len(names) / 2 + 0.5) / (len(names) + 1) for which in range(len(cases))
        ]
        axes.bar(at, gains, width=1 / (len(names) + 1), label=name)
    axes.set_xticks(range(len(cases)), [shape_of(one) for one in cases], fontsize=7)
    axes.set(ylabel="% faster than without prefetch")
    axes.set_title(f"decode steps, hit rate {load('decode_prefetch')['hit_rate']}")
    axes.legend(fontsize=7)
    save_figure(drawing, PLOTS / "steps.png")


def plot_prefill() -> None:
    """Prefill's segment with prefetch, without, and with nothing missing."""
    found = load("prefill_segment")["segments"]
    counts = sorted({one["queries"] for one in found})
    names = ("off", "fused", "resident")
    drawing, panels = figure(columns=len(counts))
    for axes, queries in zip(panels, counts, strict=True):
        mine = [one for one in found if one["queries"] == queries]
        for place, name in enumerate(names):
            at = [which + (place - 1) / 4 for which in range(len(mine))]
            axes.bar(at, [one["us"][name]["median"] for one in mine], width=0.25, label=name)
        labels = [f"{one['selections']}\n{one['hit']:g}" for one in mine]
        axes.set_xticks(range(len(mine)), labels, fontsize=7)
        axes.set(ylabel="us a layer", xlabel="selections, hit rate")
        axes.set_title(f"{queries} queries over {mine[0]['context']:,} tokens")
    panels[0].legend(fontsize=7)
    save_figure(drawing, PLOTS / "prefill.png")


def plot_bins() -> None:
    """How many of prefill's scores share the bin of the k-th, by chunk."""
    result = load("prefill-bins")
    drawing, (axes,) = figure(columns=1)
    for place, how in enumerate(("plain", "shifted")):
        boxes = [
            dict(zip(("whislo", "q1", "med", "q3", "whishi"), chunk[how], strict=True))
            | {"fliers": []}
            for chunk in result["chunks"]
        ]
        colour = f"C{place}"
        axes.bxp(
            boxes, positions=[at + 0.3 * place for at in range(len(boxes))], widths=0.25,
            showfliers=False, boxprops={"color": colour}, medianprops={"color": colour},
        )  # fmt: skip
        axes.plot([], [], color=colour, label=how)
    axes.set_xticks(range(len(result["chunks"])), [f"{x['first']:,}" for x in result["chunks"]])
    axes.axhline(result["k"], color="black", linewidth=0.8)
    axes.set(
        xlabel="first token of the chunk", ylabel="scores in the bin of the k-th", yscale="log"
    )
    axes.set_title(f"the demo model's prefill, k = {result['k']} (the line)")
    axes.legend(fontsize=7)
    save_figure(drawing, PLOTS / "bins.png")


def plot() -> None:
    """Draw everything."""
    for draw in (
        plot_selecting_and_recalling,
        plot_segments,
        plot_moved,
        plot_gathers,
        plot_steps,
        plot_prefill,
        plot_bins,
    ):
        draw()
