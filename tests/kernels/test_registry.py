"""The registry hands out one backend, whole, or says why it can't."""

import inspect
import logging
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from echokv.errors import KernelUnavailable
from echokv.kernels.cuda import fused, prefetch
from echokv.kernels.protocol import (
    Fp8Kernels,
    FusedPrefetch,
    FusedRecall,
    Kernels,
    ModelKernels,
)
from echokv.kernels.registry import AUTO_ON_HOPPER, BACKENDS, CUDA_OPS, OPS, folder_of, load_kernels

HAS_CUDA = torch.cuda.is_available()
HAS_HOPPER = HAS_CUDA and torch.cuda.get_device_capability()[0] == 9
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def runnable() -> list[tuple[str, torch.device]]:
    """Backends and devices that this machine can run."""
    pairs = [("reference", CPU)]
    if not HAS_CUDA:
        return [*pairs, ("triton", CPU)]
    return [*pairs, ("reference", CUDA), ("triton", CUDA), *[("cuda", CUDA)] * HAS_HOPPER]


@pytest.mark.parametrize("name, device", runnable())
def test_every_op_has_the_protocols_signature(name: str, device: torch.device) -> None:
    kernels = load_kernels(name, device)
    assert kernels.name == name
    assert kernels.token_tile == (32 if name == "reference" else None)
    declared = vars(Kernels) | vars(Fp8Kernels) | vars(ModelKernels)
    facts = {name for name, value in declared.items() if isinstance(value, property)}
    ops = {name for name in declared if not name.startswith("_")} - facts
    assert ops == set(OPS)
    for op in OPS:
        want = list(inspect.signature(getattr(Kernels, op)).parameters.values())[1:]
        got = list(inspect.signature(getattr(kernels, op)).parameters.values())
        assert [(p.name, p.kind) for p in got] == [(p.name, p.kind) for p in want], op
        assert getattr(kernels, op).__module__ == f"echokv.kernels.{folder_of(name, op)}.{OPS[op]}"


@pytest.mark.parametrize("protocol, module", [(FusedRecall, fused), (FusedPrefetch, prefetch)])
def test_fused_ops_have_the_protocols_signature(protocol: type, module: ModuleType) -> None:
    """What a wrapper takes beside is for tools, and has a default."""
    ops = [name for name in vars(protocol) if not name.startswith("_")]
    assert ops
    for op in ops:
        want = list(inspect.signature(getattr(protocol, op)).parameters.values())[1:]
        got = list(inspect.signature(getattr(module, op)).parameters.values())
        assert [(p.name, p.kind) for p in got[: len(want)]] == [(p.name, p.kind) for p in want], op
        assert all(p.default is not p.empty for p in got[len(want) :]), op


def test_auto_takes_the_reference_on_the_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="echokv"):
        assert load_kernels("auto", CPU).name == "reference"
    assert "kernels: reference on cpu (asked for: auto)" in caplog.text


@pytest.mark.gpu
def test_auto_takes_what_was_decided_on_hopper_and_triton_elsewhere() -> None:
    assert load_kernels("auto", CUDA).name == (AUTO_ON_HOPPER if HAS_HOPPER else "triton")


def test_cuda_is_an_error_on_the_cpu_that_says_why() -> None:
    with pytest.raises(KernelUnavailable, match="--backend cuda runs on cuda, not on cpu"):
        load_kernels("cuda", CPU)


@pytest.mark.gpu
@pytest.mark.skipif(HAS_HOPPER, reason="needs a GPU other than Hopper")
def test_cuda_on_another_gpu_is_an_error_that_says_which() -> None:
    with pytest.raises(KernelUnavailable, match="built for compute capability 9"):
        load_kernels("cuda", CUDA)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_cuda_says_which_ops_it_takes_from_where(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="echokv"):
        kernels = load_kernels("cuda", CUDA)
    assert kernels.fused is not None
    words = f"CUDA C++ for {', '.join(CUDA_OPS)}, fused recall; Triton for encode_rows"
    assert words in caplog.text


def test_an_unknown_backend_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(KernelUnavailable, match=f"'tpu' is not one of auto, {', '.join(BACKENDS)}"):
        load_kernels("tpu", CPU)


@pytest.mark.skipif(HAS_CUDA, reason="needs a machine without CUDA")
def test_triton_without_a_gpu_is_an_error_that_says_why() -> None:
    with pytest.raises(KernelUnavailable, match="sees no CUDA device"):
        load_kernels("triton", CUDA)


def test_triton_on_the_cpu_needs_the_interpreter() -> None:
    script = (
        "import torch\n"
        "from echokv.errors import KernelUnavailable\n"
        "from echokv.kernels.registry import load_kernels\n"
        "try:\n"
        "    load_kernels('triton', torch.device('cpu'))\n"
        "except KernelUnavailable as error:\n"
        "    print(error)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "set TRITON_INTERPRET=1 before Python starts (it is unset)" in done.stdout
