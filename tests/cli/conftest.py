"""A demo checkpoint that the command-line tests share."""

from pathlib import Path

import pytest

from echokv.cli.main import main

SMALL_ENGINE = (
    "--max-model-len 1024 --host-pool-gib 0.02 --device-pool-tokens 256 --max-num-seqs 2"
    " --max-num-batched-tokens 128"
).split()
"""Flags under which the demo model offloads and starts quickly."""


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as `echokv demo-model` writes it."""
    path = tmp_path_factory.mktemp("cli") / "demo"
    assert main(["demo-model", str(path)]) == 0
    return path
