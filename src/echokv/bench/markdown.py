"""Results as Markdown tables."""

from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[object]], *, words: int = 1) -> str:
    """Lay out a table.

    Args:
        header: the columns' titles.
        rows: cells; None is an empty one, floats have one decimal.
        words: so many columns, from the left, hold words; the others numbers, set to the right.
    """
    titles = list(header)
    rule = "|---" * words + "|---:" * (len(titles) - words) + "|"
    first, *others = (f"| {' | '.join(map(_cell, line))} |" for line in (titles, *rows))
    return "\n".join([first, rule, *others])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if isinstance(value, float) else str(value)
