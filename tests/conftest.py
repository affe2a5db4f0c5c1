"""What every test shares: the GPU marker and, without a GPU, Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so it is set here, before any test module is.
Likewise OpenMP's wait policy: threads that spin while others need the core made the model forty
times slower on two busy cores.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; the report counts them."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
