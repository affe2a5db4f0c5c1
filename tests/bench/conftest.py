"""The checkpoint that the tests of traces and quality share."""

from pathlib import Path

import pytest

from echokv.models.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of two layers, index_topk 64."""
    path = tmp_path_factory.mktemp("bench-model")
    write_random_checkpoint(path, num_hidden_layers=2)
    return path
