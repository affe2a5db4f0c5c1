"""Runs one test body on every implementation of an op that this machine can run."""

import importlib
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels import cuda_emulator

from echokv.kernels.registry import CUDA_OPS, OPS

HAS_CUDA = torch.cuda.is_available()
HAS_HOPPER = HAS_CUDA and torch.cuda.get_device_capability()[0] == 9


@dataclass(frozen=True)
class Backend:
    """One implementation of the ops, and where its tensors live."""

    name: str  # reference, triton or cuda
    device: torch.device

    def op(self, name: str) -> Callable[..., Any]:
        """The op's function."""
        if self.name == "cuda" and name not in CUDA_OPS:
            pytest.skip(f"{name} has no CUDA C++ kernel: Triton's is tested as triton-cuda")
        module = importlib.import_module(f"echokv.kernels.{self.name}.{OPS[name]}")
        function: Callable[..., Any] = getattr(module, name)
        return function

    @property
    def interpreted(self) -> bool:
        """Slow: Triton's interpreter stands in for the GPU, so keep sizes small."""
        return self.name == "triton" and self.device.type == "cpu"


@pytest.fixture(scope="session")
def emulator() -> cuda_emulator.Emulator:
    """The CUDA kernels on the CPU; needs g++."""
    return cuda_emulator.emulator()


@pytest.fixture(
    params=[
        "reference-cpu",
        pytest.param(
            "triton-interpreter",
            marks=pytest.mark.skipif(HAS_CUDA, reason="runs as triton-cuda on this machine"),
        ),
        pytest.param("triton-cuda", marks=pytest.mark.gpu),
        pytest.param(
            "cuda-cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(HAS_CUDA and not HAS_HOPPER, reason="needs a Hopper GPU"),
            ],
        ),
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend in turn; triton-cuda is skipped, visibly, without a GPU."""
    name, _, where = request.param.partition("-")
    return Backend(name, torch.device("cuda" if where == "cuda" else "cpu"))


@pytest.fixture
def reference() -> Backend:
    """The plain PyTorch ops on the CPU."""
    return Backend("reference", torch.device("cpu"))


@pytest.fixture
def device(backend: Backend) -> torch.device:
    """Where the backend's tensors live."""
    return backend.device


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fill `torch.empty` with NaN or the largest integer."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class E4M3:
    """The e4m3 format from its definition (OCP FP8): sign, 4 exponent bits of bias 7, 3 mantissa.

    Code 0x7f (and 0xff) is NaN, there are no infinities, the largest value is 448.
    """

    def __init__(self) -> None:
        codes = np.arange(256)
        exponent, mantissa = (codes >> 3) & 15, codes & 7
        normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
        magnitude[codes & 127 == 127] = np.nan
        self.values = np.where(codes >= 128, -magnitude, magnitude)  # [256] float64

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """uint8 codes -> float64 values."""
        return self.values[codes]

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Finite values, |x| <= 448 -> uint8 codes of the nearest, ties to the even mantissa."""
        grid = self.values[:127]  # ascending magnitudes
        magnitude = np.abs(x).astype(np.float64)
        high = np.searchsorted(grid, magnitude).clip(1, 126)
        below, above = magnitude - grid[high - 1], grid[high] - magnitude
        code = np.where(below < above, high - 1, high)
        code = np.where(below == above, high - high % 2, code)
        return (code + 128 * np.signbit(x)).astype(np.uint8)


@pytest.fixture(scope="session")
def e4m3() -> E4M3:
    """An oracle for fp8 that shares nothing with torch or Triton."""
    return E4M3()


@pytest.fixture
def lazy_bytes() -> Callable[[int, torch.device], torch.Tensor]:
    """Makes huge zeroed uint8 tensors; on the CPU, pages nobody touches take no memory."""

    def make(size: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        return torch.zeros(size, dtype=torch.uint8, device=device)

    return make
