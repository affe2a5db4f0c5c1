"""Where a figure was measured: machine, versions and commit; and how results are written."""

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echokv.errors import ConfigError

_PACKAGES = ("echokv", "torch", "triton", "transformers", "numpy")


def environment(code_commit: str | None = None) -> dict[str, Any]:
    """Date, machine, package versions and commit, ready for JSON.

    A package that isn't installed has the version None.

    Args:
        code_commit: commit of the code, where it runs from a copy without its git history.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "commit": code_commit or commit(),
    }


def machine() -> dict[str, Any]:
    """Processor, memory and GPUs of this machine."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": [gpu.name for gpu in gpus],
        "gpu_memory_gib": [round(gpu.total_memory / 2**30, 1) for gpu in gpus],
        "cuda": torch.version.cuda,
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide speed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        found[package] = package_version(package)
    return found


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(directory: Path = Path(__file__).parent) -> str | None:
    """The commit that a directory is checked out at, by default this code's.

    None outside a git repository; ends in `-dirty` when tracked files differ from the commit.
    """
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def cpu_name() -> str:
    """The processor's marketing name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its environment, making the folder.

    Args:
        path: the file; replaced when it exists.
        result: what was measured; its keys stay at the top level, beside those of `environment`.

    Raises:
        ConfigError: the file can't be written.
    """
    write_text(path, json.dumps(environment() | result, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, making the folder.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
