"""Who serves what: resolved once, said, and an error where a library was asked for in vain."""

import dataclasses
import logging
from types import ModuleType

import pytest
import torch

from echokv.errors import KernelUnavailable
from echokv.kernels import libraries
from echokv.kernels.libraries import OWN, Choice, LibraryRequest, choose
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import IndexKeyFormat, RowFormat

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REQUEST = LibraryRequest(
    row_format=RowFormat(name="fp8_ds_mla", latent_dim=512, rope_dim=64),
    index_key_format=IndexKeyFormat(name="fp8", head_dim=128),
    num_heads=128,
    index_heads=64,
    dtype=torch.bfloat16,
    fp8_weights=True,
)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper GPU on which both libraries load."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for name in ("load_flash_mla", "load_deep_gemm"):
        monkeypatch.setattr(libraries, name, lambda: ModuleType("library"))


def kernels_of(choices: tuple[Choice, ...]) -> dict[str, str]:
    return {choice.part: choice.kernel for choice in choices}


@pytest.mark.usefixtures("on_hopper")
def test_auto_takes_the_libraries_on_hopper() -> None:
    found = kernels_of(choose("triton", CUDA, REQUEST))
    assert found == {"attention": "flashmla", "gemm": OWN, "indexer": "deepgemm"}
    assert kernels_of(choose("cuda", CUDA, REQUEST)) == {**found, "indexer": OWN}
    assert kernels_of(choose("cuda", CUDA, dataclasses.replace(REQUEST, **LIBRARY))) == LIBRARY


@pytest.mark.usefixtures("on_hopper")
def test_ours_when_asked_for() -> None:
    asked = dataclasses.replace(REQUEST, attention=OWN, gemm="torch", indexer=OWN)
    choices = choose("cuda", CUDA, asked)
    assert kernels_of(choices) == {"attention": OWN, "gemm": "torch", "indexer": OWN}
    assert all(choice.refusal is None for choice in choices)


CASES = [
    ("attention", {"dtype": torch.float32}, "it takes bfloat16 queries, --dtype is torch.float32"),
    ("attention", {"num_heads": 256}, "at most 128 heads, this model has 256"),
    (
        "attention",
        {"row_format": RowFormat(name="bfloat16", latent_dim=512, rope_dim=64)},
        "reads fp8_ds_mla rows, --kv-cache-dtype is bfloat16",
    ),
    (
        "attention",
        {"row_format": RowFormat(name="fp8_ds_mla", latent_dim=256, rope_dim=64)},
        r"rows are 512 \+ 64 wide, this model's \(256, 64\)",
    ),
    ("gemm", {"fp8_weights": False}, "no weights are kept in fp8"),
    ("indexer", {"index_heads": 16}, "takes 32 or 64 index heads, this model has 16"),
    (
        "indexer",
        {"index_key_format": IndexKeyFormat(name="bfloat16", head_dim=128)},
        "reads fp8 keys, --index-key-dtype is bfloat16",
    ),
]
LIBRARY = {"attention": "flashmla", "gemm": "deepgemm", "indexer": "deepgemm"}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("part, changed, why", CASES)
def test_what_a_library_cannot_serve(part: str, changed: dict[str, object], why: str) -> None:
    request = dataclasses.replace(REQUEST, **changed)
    auto = {choice.part: choice for choice in choose("triton", CUDA, request)}[part]
    assert auto.kernel == OWN
    with pytest.raises(KernelUnavailable, match=why):
        choose("triton", CUDA, dataclasses.replace(request, **{part: LIBRARY[part]}))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, on_hopper: None) -> None:
    def missing() -> ModuleType:
        raise ImportError("No module named 'flash_mla'")

    monkeypatch.setattr(libraries, "load_flash_mla", missing)
    attention = choose("triton", CUDA, REQUEST)[0]
    assert attention.kernel == OWN
    assert attention.refusal == "No module named 'flash_mla' (pip install 'echokv[hopper]')"


def test_another_gpu_is_named(monkeypatch: pytest.MonkeyPatch, on_hopper: None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.raises(KernelUnavailable, match=r"needs a Hopper GPU .*, this one has 8.9"):
        choose("triton", CUDA, dataclasses.replace(REQUEST, indexer="deepgemm"))


def test_the_reference_has_its_own_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="echokv"):
        kernels = load_kernels("reference", CPU, REQUEST)
    assert kernels.library_mla is None and kernels.scheduled_scores is None
    assert (
        "attention by reference's own (--backend reference has kernels of its own only)"
        in caplog.text
    )
    with pytest.raises(KernelUnavailable, match="--attention-kernel flashmla can't be used"):
        load_kernels("reference", CPU, dataclasses.replace(REQUEST, attention="flashmla"))


def test_an_unknown_kernel_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(KernelUnavailable, match="--gemm-kernel cutlass is not one of auto, deepg"):
        choose("triton", CPU, dataclasses.replace(REQUEST, gemm="cutlass"))
