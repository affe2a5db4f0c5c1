"""Writes the tables of docs/performance.md that come from cuda_cache.json.

    python benchmarks/device/cuda_tables.py

Each lies between two marks in the document, `<!-- cuda_cache: NAME -->` and `<!-- end -->`; what
stands between them is replaced. A figure that the JSON lacks is left empty.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
JSON = ROOT / "benchmarks" / "results" / "cuda_cache.json"
DOCUMENT = ROOT / "docs" / "performance.md"
HISPARSE = {
    (1, 0.0): 17, (13, 0.0): 19, (64, 0.0): 22, (1, 0.03): 27, (13, 0.03): 33, (64, 0.03): 78,
    (13, 0.1): 57,
}  # fmt: skip
"""Microseconds of SGLang HiSparse's swap-in by batch and share missing, of an earlier run."""

Row = dict[str, Any]


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Markdown; None is an empty cell, floats have one decimal."""

    def cell(value: object) -> str:
        if value is None:
            return ""
        return f"{value:.1f}" if isinstance(value, float) else str(value)

    lines = [
        list(header),
        ["---" for _ in header],
        *([cell(value) for value in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def median(found: Iterable[Row], /, **wanted: Any) -> float | None:
    """The median of the first row that has these values."""
    for row in found:
        if all(row.get(name) == value for name, value in wanted.items()):
            return float(row["median"])
    return None


def resident(report: Row, row_bytes: int) -> str:
    """make_resident beside Triton, a bare gather and the peer."""
    rows = report.get(f"make_resident_us {row_bytes}", [])
    lines = []
    for one in rows:
        if one["variant"] != "cuda" or "batch" not in one:
            continue
        case = {name: one[name] for name in ("batch", "missing", "recalled_rows")}
        gather = median(rows, variant="gather", recalled_rows=one["recalled_rows"])
        lines.append((
            one["batch"], f"{one['missing']:.1%}", f"{one['recalled_rows']:,}", one["median"],
            median(rows, variant="triton", **case), gather,
            None if gather is None else one["median"] - gather,
            HISPARSE.get((one["batch"], one["missing"])),
        ))  # fmt: skip
    header = ("batch", "missing", "rows recalled", "CUDA, one launch", "Triton, op by op", "gather",
              "CUDA less gather", "SGLang HiSparse (earlier run)")  # fmt: skip
    return table(header, lines)


def step(report: Row) -> str:
    """What the cache adds to a step."""
    rows = report.get("step_us", [])
    cases = {(row["batch"], row["recalled_rows"]): None for row in rows}
    ways = list(dict.fromkeys(row["victims"] for row in rows))
    lines = [
        (batch, f"{missing:,}", *(median(rows, batch=batch, recalled_rows=missing, victims=way)
                                  for way in ways))
        for batch, missing in cases
    ]  # fmt: skip
    names = {
        "beside": "CUDA, victims beside the model",
        "at the start": "CUDA, victims at the start",
        "cuda": "CUDA",
        "triton": "Triton",
    }
    return table(("batch", "rows recalled a layer", *(names[way] for way in ways)), lines)


def append(report: Row) -> str:
    """New rows, and the lists of victims."""
    rows = report.get("append_us", [])
    batches = {row["batch"]: None for row in rows}
    lines = [
        (batch, *(median(rows, batch=batch, variant=name) for name in ("cuda", "triton")))
        for batch in batches
    ]
    return table(("new rows", "CUDA, one launch", "Triton, op by op"), lines)


def victims(report: Row) -> str:
    """choose_victims by layers and length."""
    lines = [
        (row["layers"], f"{row['num_ready']:,}", row["median"])
        for row in report.get("choose_victims_us", [])
    ]
    return table(("layers", "slots listed, of 200,000", "us"), lines)


def topk(report: Row) -> str:
    """By shape."""
    rows = report.get("topk_us", [])
    shapes = {(row["rows"], row["width"]): None for row in rows}
    lines = [
        (f"{count} x {width:,}", *(median(rows, rows=count, width=width, variant=name)
                                   for name in ("cuda", "triton", "torch")))
        for count, width in sorted(shapes)
    ]  # fmt: skip
    return table(("rows x tokens", "CUDA", "Triton", "torch.topk"), lines)


def commit(report: Row) -> str:
    """Which code ran."""
    return f"Measured at commit {report['environment'].get('commit') or 'unknown'}."


def main() -> int:
    """Replace every table; 1 when a mark names none."""
    report = json.loads(JSON.read_text())
    tables = {
        "commit": commit(report),
        "resident": resident(report, 656),
        "resident 1152": resident(report, 1152),
        "step": step(report),
        "append": append(report),
        "victims": victims(report),
        "topk": topk(report),
    }
    text = DOCUMENT.read_text()
    marks = re.findall(r"<!-- cuda_cache: (.+?) -->", text)
    unknown = [name for name in marks if name not in tables]
    for name in marks:
        if name not in unknown:
            pattern = rf"(<!-- cuda_cache: {re.escape(name)} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda m, n=name: f"{m[1]}{tables[n]}\n{m[2]}", text, flags=re.S)
    DOCUMENT.write_text(text)
    print(f"{DOCUMENT}: {len(marks) - len(unknown)} tables from {JSON}")
    if unknown:
        print(f"no such table: {unknown}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
