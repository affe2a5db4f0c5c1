"""Logging and progress for the places where people wait.

One logger tree under `echokv`; `setup` is called once, by the command line or the server.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def get_logger(name: str) -> logging.Logger:
    """The logger for a module; pass `__name__`."""
    return logging.getLogger(name)


def setup(level: str = "info") -> None:
    """Send echokv's log lines to stderr.

    Args:
        level: a `logging` level name, any case.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger("echokv")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def progress(items: Iterable[T], *, total: int, what: str, unit: str = "it") -> Iterator[T]:
    """Iterate with a progress bar on stderr; silent when stderr is not a terminal.

    Args:
        items: what to iterate over.
        total: how many items there are.
        what: the words in front of the bar.
        unit: the unit that the rate is shown in.
    """
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc=what, unit=unit, disable=not sys.stderr.isatty())
