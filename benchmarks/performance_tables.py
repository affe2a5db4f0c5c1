"""Results, for the scripts that fill docs/performance.md."""

import functools
from collections.abc import Iterable
from typing import Any

from doc_tables import RESULTS, result

Row = dict[str, Any]


def load(name: str) -> Row:
    """A result by its file's name; empty when there is none."""
    return result(name) if (RESULTS / f"{name}.json").exists() else {}


@functools.cache
def decode_files() -> tuple[str, ...]:
    """Results of decode.py on the whole model, oldest first: its cases may lie in several."""
    names = [path.stem for path in RESULTS.glob("decode*-h200.json") if "dense" not in path.stem]
    return tuple(sorted(names, key=lambda name: str(load(name)["date"])))


def decode_case(case: str) -> Row:
    """A case of decode.py by its newest file; of several pools, each by its newest file."""
    found: Row = {}
    for name in decode_files():
        found |= load(name).get(case, {})
    return found


def variants(case: str) -> Row:
    """The sides of a case that was measured; empty when it was not."""
    sides: Row = decode_case(case).get("variants", {})
    return sides


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


def number(value: float | None, form: str = ".1f") -> str:
    """A figure, or a stroke for none."""
    return "-" if value is None else format(value, form)


def cells(values: Iterable[float | None], form: str = ".1f") -> str:
    """Figures with strokes between them."""
    return " / ".join(number(value, form) for value in values)


def met(values: Iterable[float | None], goals: Iterable[float], *, at_least: bool = False) -> str:
    """Whether every figure is within its goal, and how many were measured where not all were."""
    pairs = list(zip(values, goals, strict=True))
    known = [(value, goal) for value, goal in pairs if value is not None]
    if not known:
        return "not measured"
    good = sum(value >= goal if at_least else value <= goal for value, goal in known)
    if good == len(pairs):
        return "yes"
    return (
        f"{good} of {len(known)} measured"
        if len(known) < len(pairs)
        else (f"no ({good} of {len(known)})" if good else "no")
    )
