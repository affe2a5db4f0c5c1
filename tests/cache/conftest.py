"""Small caches on every backend that this machine can run."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.cache.harness import BACKENDS, Cache, make_cache
from tests.kernels.cuda_emulator import COMPILER

HAS_CUDA = torch.cuda.is_available()
HAS_HOPPER = HAS_CUDA and torch.cuda.get_device_capability()[0] == 9
_MARKS = {
    "triton-interpreter": pytest.mark.skipif(HAS_CUDA, reason="runs as triton-cuda here"),
    "cuda-emulated": pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    "triton-cuda": pytest.mark.gpu,
    "cuda-cuda": [
        pytest.mark.gpu,
        pytest.mark.skipif(HAS_CUDA and not HAS_HOPPER, reason="needs a Hopper GPU"),
    ],
}


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in BACKENDS])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Every backend in turn, as `make_cache` names it."""
    return str(request.param)


@pytest.fixture
def new_cache(backend_name: str) -> Iterator[Callable[..., Cache]]:
    """Makes caches; see `harness.make_cache`."""
    torch.manual_seed(7)
    made: list[Cache] = []

    def make(**sizes: int) -> Cache:
        made.append(make_cache(backend_name, **sizes))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
