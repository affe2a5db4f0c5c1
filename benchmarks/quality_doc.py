"""Fills the tables of docs/quality.md from JSON results, and draws their plots beside it.

    python benchmarks/quality_doc.py            # tables and plots
    python benchmarks/quality_doc.py --check    # status 1 when the document is out of date

Marks are those of `doc_tables.py`; a table has the name of its result's file in benchmarks/results,
without its suffix, and docs/quality.md the command that writes that file.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import doc_tables

from echokv.bench.markdown import table
from echokv.bench.quality_report import plot_quality, render_quality, render_tasks
from echokv.bench.trace_report import plot_replay, render_replay

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "quality.md"
PLOTS = ROOT / "docs" / "plots"


def section(name: str, result: dict[str, Any]) -> str:
    """The Markdown of one result, with where it was measured."""
    if "groups" in result:
        text = f"{render_quality(result)}\n\n{render_tasks(result)}"
    elif "studies" in result:
        text = render_studies(result)
    else:
        text = render_replay(result)
    machine = result["machine"]
    where = ", ".join(machine["gpus"]) or machine["cpu"]
    return f"{text}\n\n`{name}.json`: {where}, {result['date'][:10]}, commit `{result['commit']}`."


def render_studies(result: dict[str, Any]) -> str:
    """The policies of `policy_study.py`: a row a policy, a column a trace and pool."""
    studies = result["studies"]
    header = ["policy", *(f"{one['trace']}, {one['fraction']}" for one in studies)]
    lines = [
        [policy, *(f"{100 * one['hit_rates'][policy]:.2f}%" for one in studies)]
        for policy in studies[0]["hit_rates"]
    ]
    return table(header, lines)


def plots(name: str, result: dict[str, Any]) -> None:
    """Draw one result."""
    if "groups" in result:
        plot_quality(result, PLOTS / f"{name}.png")
    elif "pools" in result:
        plot_replay(result, PLOTS / name)


def plot() -> None:
    """Draw everything."""
    for name in doc_tables.names(DOCUMENT):
        plots(name, doc_tables.result(name))


def filled(name: str) -> str:
    """One table."""
    return section(name, doc_tables.result(name))


if __name__ == "__main__":
    TABLES = {name: functools.partial(filled, name) for name in doc_tables.names(DOCUMENT)}
    sys.exit(doc_tables.main(DOCUMENT, TABLES, __doc__, plot))
