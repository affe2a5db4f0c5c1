"""What every test shares: the GPU marker and, without a GPU, Triton's interpreter.

Both variables are read when torch and triton are imported, so they are set here, before any test
module is: idle OpenMP threads must sleep, not spin, where the workers outnumber the cores.
"""

import os

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

from echokv.cache import ready  # noqa: E402

ready.FREE_SHARE, ready.PREFETCH_FREE_SHARE = 4, 2  # of pools as small as tests have them


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the long document is."""
    parser.addoption(
        "--document-tokens",
        type=int,
        default=6000,
        help="tokens of the document in tests/e2e/test_document.py (default: %(default)s)",
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Random numbers of a test are the same whatever ran before it."""
    torch.manual_seed(20)


@pytest.fixture
def document_tokens(request: pytest.FixtureRequest) -> int:
    """The value of --document-tokens."""
    tokens: int = request.config.getoption("--document-tokens")
    return tokens


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; the report counts them."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
