"""The results of `bench quality` as a Markdown table and a plot."""

from pathlib import Path
from typing import Any

from echokv.bench.markdown import table
from echokv.bench.plots import figure, save_figure


def render_quality(result: dict[str, Any]) -> str:
    """One table: a row a variant, exact match a group, then what was identical."""
    groups = result["groups"]
    header = ["variant", *(f"{group['length']}" for group in groups), "identical outputs"]
    header += ["hit rate", "exact rows found"]
    lines = []
    for place, row in enumerate(groups[0]["rows"]):
        rows = [group["rows"][place] for group in groups]
        cells = [row["variant"], *(f"{one['exact_match']:.3f}" for one in rows)]
        cells.append(f"{sum(r['identical'] for r in rows)}/{sum(r['total'] for r in rows)}")
        lines.append([*cells, _mean(rows, "hit_rate"), _mean(rows, "overlap")])
    return table(header, lines)


def render_tasks(result: dict[str, Any]) -> str:
    """A second table: exact match by task and group, of the resident variant and the lossy ones."""
    tasks, lines = result["tasks"], []
    for group in result["groups"]:
        for row in group["rows"]:
            if row["kind"] != "offloaded":
                scores = [row["exact_match_by_task"].get(task) for task in tasks]
                cells = ["" if score is None else f"{score:.3f}" for score in scores]
                lines.append([group["length"], row["variant"], *cells])
    return table(["length", "variant", *tasks], lines, words=2)


def plot_quality(result: dict[str, Any], path: Path) -> Path:
    """Exact match by group, a bar a variant (offloaded ones as one, when all are identical)."""
    drawing, axes = figure(columns=1)
    groups = result["groups"]
    shown = [
        place
        for place, row in enumerate(groups[0]["rows"])
        if row["kind"] != "offloaded" or not result["lossless"]
    ]
    width = 0.8 / len(shown)
    for index, place in enumerate(shown):
        name = groups[0]["rows"][place]["variant"]
        if result["lossless"] and groups[0]["rows"][place]["kind"] == "resident":
            name += " = offloaded"
        heights = [group["rows"][place]["exact_match"] for group in groups]
        places = [number - 0.4 + (index + 0.5) * width for number in range(len(groups))]
        axes[0].bar(places, heights, width, label=name)
    axes[0].set_xticks(range(len(groups)), [group["length"] for group in groups])
    axes[0].set_xlabel("context, tokens")
    axes[0].set_ylabel("exact match")
    axes[0].set_ylim(0, 1)
    axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(drawing, path)


def _mean(rows: list[dict[str, Any]], key: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return f"{sum(values) / len(values):.3f}" if values else ""
