"""Fills the tables of docs/quality.md from JSON results, and draws their plots beside it.

    python benchmarks/quality_doc.py            # every table whose JSON exists
    python benchmarks/quality_doc.py --check    # status 1 when the document is out of date

Each table stands between `<!-- NAME -->` and `<!-- end NAME -->`, where NAME is the result's file
in benchmarks/results without its suffix; docs/quality.md names the command that writes that file.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from echokv.bench.quality_report import plot_quality, render_quality, render_tasks
from echokv.bench.trace_report import plot_replay, render_replay

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "quality.md"
PLOTS = ROOT / "docs" / "plots"
RESULTS = ROOT / "benchmarks" / "results"


def table(name: str, result: dict[str, Any]) -> str:
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
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * len(studies)]
    for policy in studies[0]["hit_rates"]:
        rates = [f"{100 * one['hit_rates'][policy]:.2f}%" for one in studies]
        lines.append(f"| {policy} | " + " | ".join(rates) + " |")
    return "\n".join(lines)


def plots(name: str, result: dict[str, Any]) -> None:
    """Draw one result."""
    if "groups" in result:
        plot_quality(result, PLOTS / f"{name}.png")
    elif "pools" in result:
        plot_replay(result, PLOTS / name)


def main() -> int:
    """Rewrite the document, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; say if it would")
    check = parser.parse_args().check
    before = text = DOCUMENT.read_text()
    for file in sorted(RESULTS.glob("*.json")):
        name = file.stem
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        if start not in text:
            continue
        result = json.loads(file.read_text())
        head, _, rest = text.partition(start)
        _, _, tail = rest.partition(end)
        text = f"{head}{start}\n{table(name, result)}\n{end}{tail}"
        if not check:
            plots(name, result)
    if check:
        if text != before:
            print(f"{DOCUMENT} is out of date: python benchmarks/quality_doc.py", file=sys.stderr)
        return int(text != before)
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
