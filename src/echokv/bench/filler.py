"""Text to hide things in: the Python standard library's own sources, found on any machine.

A fifth of the files is held out by name: training reads the rest, evaluation only these. The text
differs between Python versions, so exact prompts do too.
"""

import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path
from random import Random

from echokv.errors import ConfigError

SPLITS = ("train", "held-out")
LINE_CHARACTERS = 160
"""Longer lines are left out: they are tables, not text."""

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
)
_FILE_BYTES = (500, 200_000)
"""Smallest and largest file; beyond are stubs and tables."""


def is_held_out(name: str) -> bool:
    """Whether the file with that name, folders within the library included, is for evaluation."""
    return hashlib.sha256(name.encode()).digest()[0] % 5 == 0


def library_files(root: Path | None = None) -> list[Path]:
    """The library's modules in order of name, without tests and tables.

    Args:
        root: folder to look in; None: this interpreter's standard library.

    Raises:
        ConfigError: nothing found.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not _SKIPPED_FOLDERS.intersection(file.relative_to(root).parts)
        and _FILE_BYTES[0] <= file.stat().st_size <= _FILE_BYTES[1]
    ]
    if not files:
        raise ConfigError(f"no Python sources under {root}: tasks take their filler text from them")
    return files


@lru_cache(maxsize=2)
def filler_lines(split: str) -> tuple[str, ...]:
    """Every usable line of one split's files, in order, each with its newline.

    Args:
        split: "train" or "held-out".
    """
    if split not in SPLITS:
        raise ConfigError(f"filler split {split!r} is not one of {', '.join(SPLITS)}")
    root = Path(sysconfig.get_paths()["stdlib"])
    lines: list[str] = []
    for file in library_files(root):
        if is_held_out(file.relative_to(root).as_posix()) == (split == "held-out"):
            text = file.read_text(encoding="utf-8", errors="ignore")
            lines += [f"{line.rstrip()}\n" for line in text.split("\n")]
    return tuple(line for line in lines if len(line) <= LINE_CHARACTERS)


def filler_from(split: str, rng: Random) -> "FillerStream":
    """An endless run of consecutive lines that begins anywhere."""
    lines = filler_lines(split)
    return FillerStream(lines, rng.randrange(len(lines)))


class FillerStream:
    """Consecutive lines, from the beginning again after the last."""

    def __init__(self, lines: tuple[str, ...], start: int) -> None:
        self._lines = lines
        self._next = start

    def take(self, count: int) -> list[str]:
        """The next `count` lines."""
        size = len(self._lines)
        taken = [self._lines[(self._next + i) % size] for i in range(count)]
        self._next = (self._next + count) % size
        return taken
