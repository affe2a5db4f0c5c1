"""The checkpoint that end-to-end tests share."""

from pathlib import Path

import pytest

from echokv.models.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random demo checkpoint (index_topk 64) with a layer less."""
    path = tmp_path_factory.mktemp("demo-model")
    write_random_checkpoint(path, num_hidden_layers=3)
    return path
