"""The documents' tables are what the results in benchmarks/results say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["quality", "performance", "prefetch"])
def test_tables_are_those_of_the_results(page: str) -> None:
    script = ROOT / "benchmarks" / f"{page}_doc.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
