"""Plots as PNG files, drawn without a display. matplotlib comes with the extra `bench`."""

from pathlib import Path
from typing import Any

from echokv.errors import ConfigError


def figure(*, columns: int) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'echokv[bench]'") from error
    drawing = Figure(figsize=(6 * columns, 4), layout="constrained")
    axes = [drawing.add_subplot(1, columns, place + 1) for place in range(columns)]
    for one in axes:
        one.grid(visible=True, alpha=0.3)
    return drawing, axes


def save_figure(drawing: Any, path: Path) -> Path:
    """Write a figure and return its path.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=120, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path
