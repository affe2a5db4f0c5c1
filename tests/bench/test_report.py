"""Where a figure was measured is in the file, and errors name the file."""

import json
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from echokv.bench import report
from echokv.errors import ConfigError


def test_the_environment_says_machine_versions_and_commit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    report.write_json(path, {"duration": 1.5})
    written = json.loads(path.read_text())
    assert written["duration"] == 1.5
    assert written["versions"]["python"] == platform.python_version()
    assert written["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert written["machine"]["cpus"] >= 1
    assert written["machine"]["memory_gib"] > 0
    assert len(written["machine"]["gpus"]) == torch.cuda.device_count()
    assert written["date"].endswith("+00:00")


def git(directory: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *identity, *args], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_marked_when_files_differ_from_it(tmp_path: Path) -> None:
    assert report.commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert report.commit(tmp_path) == head[:12]
    (tmp_path / "file").write_text("b")
    assert report.commit(tmp_path) == f"{head[:12]}-dirty"


def test_a_missing_package_has_no_version() -> None:
    assert report.package_version("echokv") is not None
    assert report.package_version("echokv-no-such-package") is None


def test_a_result_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/result\.json"):
        report.write_json(tmp_path / "file" / "result.json", {})
