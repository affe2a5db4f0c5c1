"""Documents whose tables come from results: between which marks, and the command that fills them.

A table lies between `<!-- table: NAME -->` and `<!-- end -->`; what stands between is replaced.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MARKS = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", flags=re.S)

Tables = Mapping[str, Callable[[], str]]


@functools.cache
def result(name: str) -> dict[str, Any]:
    """A result by its file's name, without ".json"."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def names(document: Path) -> list[str]:
    """The tables that a document has room for, in its order."""
    return [match[2] for match in MARKS.finditer(document.read_text())]


def main(
    document: Path, tables: Tables, description: str, draw: Callable[[], None] | None = None
) -> int:
    """Fill a document, then draw its plots; with --check compare only.

    Args:
        document: to be read, and written.
        tables: the document's, by name.
        description: for --help.
        draw: writes the plots.

    Returns:
        The exit status: 1 when the document and `tables` don't name the same tables, or when one
        to be checked is out of date.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; say if it would")
    check = parser.parse_args().check
    marked = names(document)
    if differing := set(marked) ^ set(tables):
        print(f"{document}: marks or tables without the other: {differing}", file=sys.stderr)
        return 1

    def filled(match: re.Match[str]) -> str:
        return f"{match[1]}{tables[match[2]]()}\n{match[3]}"

    text = document.read_text()
    stale = [match[2] for match in MARKS.finditer(text) if filled(match) != match[0]]
    if not check:
        document.write_text(MARKS.sub(filled, text))
        if draw is not None:
            draw()
    print(f"{document}: {len(marked)} tables, {len(stale)} out of date {stale or ''}".rstrip())
    return 1 if check and stale else 0
