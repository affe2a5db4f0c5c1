"""Kernels of other projects that may stand in for ours on Hopper: FlashMLA and DeepGEMM.

They come with the `hopper` extra and are imported only when chosen. Which one serves what is
decided once, at start-up; a library that was asked for by name and can't serve is an error that
says why, and `auto` takes ours then.
"""

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from echokv.errors import KernelUnavailable
from echokv.memory.formats import IndexKeyFormat, RowFormat

HOPPER = (9, 0)
EXTRA = "pip install 'echokv[hopper]'"

OWN = "backend"
"""The name by which a user asks for the backend's own kernel."""

ATTENTION_KERNELS = ("auto", "flashmla", OWN)
GEMM_KERNELS = ("auto", "deepgemm", OWN, "torch")
INDEXER_KERNELS = ("auto", "deepgemm", OWN)

AUTO = {"triton": ("attention", "indexer"), "cuda": ("attention",)}
"""What `auto` gives to a library that can serve it, by backend. FlashMLA's decode is faster than
our attention at every size measured, DeepGEMM's logits than the portable index scores; the CUDA
backend's own equal them. DeepGEMM's products are not among them yet: they are faster for large
weights, but each shape costs 2 to 6 s of compiling at the first start, and they have not been
measured in the engine; `--gemm-kernel deepgemm` takes them."""

FLASHMLA_LATENT, FLASHMLA_ROPE, FLASHMLA_HEADS = 512, 64, 128
DEEPGEMM_INDEX_HEADS, DEEPGEMM_INDEX_DIM = (32, 64), 128


@dataclass(frozen=True, kw_only=True)
class LibraryRequest:
    """What the user asked for, and what a library would have to serve."""

    attention: str = "auto"  # of ATTENTION_KERNELS
    gemm: str = "auto"  # of GEMM_KERNELS
    indexer: str = "auto"  # of INDEXER_KERNELS
    row_format: RowFormat
    index_key_format: IndexKeyFormat
    num_heads: int
    index_heads: int
    dtype: torch.dtype  # of the computation
    fp8_weights: bool  # some weights are kept in fp8


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who serves one part of the work, and why no library does where none does."""

    part: str  # attention (of decode steps), gemm or indexer
    kernel: str  # a library's name, OWN or, for products, torch
    refusal: str | None  # why the library doesn't; None: it does, or ours was asked for


def choose(backend: str, device: torch.device, request: LibraryRequest) -> tuple[Choice, ...]:
    """Who serves attention in decode steps, products with fp8 weights, and index scores.

    Args:
        backend: "reference", "triton" or "cuda".
        device: where the tensors live.
        request: what is asked and what is needed.

    Raises:
        KernelUnavailable: an unknown name, or a library asked for by name that can't serve.
    """
    parts = (
        ("attention", request.attention, ATTENTION_KERNELS, "flashmla", _no_flashmla),
        ("gemm", request.gemm, GEMM_KERNELS, "deepgemm", _no_deepgemm_products),
        ("indexer", request.indexer, INDEXER_KERNELS, "deepgemm", _no_deepgemm_scores),
    )
    return tuple(_choose(backend, device, request, *part) for part in parts)


def _choose(
    backend: str,
    device: torch.device,
    request: LibraryRequest,
    part: str,
    asked: str,
    known: tuple[str, ...],
    library: str,
    refusal_of: Callable[[LibraryRequest], str | None],
) -> Choice:
    flag = f"--{part}-kernel {asked}"
    if asked not in known:
        raise KernelUnavailable(f"{flag} is not one of {', '.join(known)}")
    if asked not in ("auto", library):
        return Choice(part=part, kernel=asked, refusal=None)
    if backend == "reference":
        refusal: str | None = "--backend reference has kernels of its own only"
    elif asked == "auto" and part not in AUTO[backend]:
        refusal = f"{library} only when asked for"
    else:
        refusal = _not_hopper(device) or refusal_of(request)
    if asked == library and refusal is not None:
        raise KernelUnavailable(f"{flag} can't be used: {refusal}")
    return Choice(part=part, kernel=library if refusal is None else OWN, refusal=refusal)


def load_flash_mla() -> ModuleType:
    """The module `flash_mla`.

    Raises:
        ImportError: it isn't there, or not what we need; with the reason.
    """
    module = importlib.import_module("flash_mla")
    if not getattr(module, "has_legacy", lambda: False)():
        raise ImportError("this flash_mla has no kernels for Hopper (has_legacy is false)")
    return module


def load_deep_gemm() -> ModuleType:
    """The module `deep_gemm`.

    Raises:
        ImportError: it isn't there, or finds no compiler; with the reason.
    """
    if find_nvcc() is None:
        raise ImportError("it compiles its kernels with nvcc: none on PATH or in CUDA_HOME")
    return importlib.import_module("deep_gemm")


def find_nvcc() -> str | None:
    """Where DeepGEMM will find its compiler."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    return shutil.which("nvcc") or next((path for path in found if Path(path).is_file()), None)


def library_problem(load: Callable[[], ModuleType]) -> str | None:
    """Why a library can't be loaded; None when it can."""
    try:
        load()
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"{error} ({EXTRA})"
    return None


def _not_hopper(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"it runs on CUDA, not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER:
        return "it needs a Hopper GPU (capability 9.0), this one has {}.{}".format(*capability)
    return None


def _first(reasons: dict[str, bool]) -> str | None:
    return next((words for words, holds in reasons.items() if holds), None)


def _no_flashmla(request: LibraryRequest) -> str | None:
    fmt = request.row_format
    dims = (fmt.latent_dim, fmt.rope_dim)
    refusal = _first(
        {
            f"it reads fp8_ds_mla rows, --kv-cache-dtype is {fmt.name}": fmt.name != "fp8_ds_mla",
            f"its rows are {FLASHMLA_LATENT} + {FLASHMLA_ROPE} wide, this model's {dims}": (
                dims != (FLASHMLA_LATENT, FLASHMLA_ROPE)
            ),
            f"it takes at most {FLASHMLA_HEADS} heads, this model has {request.num_heads}": (
                request.num_heads > FLASHMLA_HEADS
            ),
            f"it takes bfloat16 queries, --dtype is {request.dtype}": (
                request.dtype != torch.bfloat16
            ),
        }
    )
    return refusal or library_problem(load_flash_mla)


def _no_deepgemm_products(request: LibraryRequest) -> str | None:
    refusal = None if request.fp8_weights else "no weights are kept in fp8"
    return refusal or library_problem(load_deep_gemm)


def _no_deepgemm_scores(request: LibraryRequest) -> str | None:
    fmt = request.index_key_format
    refusal = _first(
        {
            f"it reads fp8 keys, --index-key-dtype is {fmt.name}": fmt.name != "fp8",
            f"its keys are {DEEPGEMM_INDEX_DIM} wide, this model's {fmt.head_dim}": (
                fmt.head_dim != DEEPGEMM_INDEX_DIM
            ),
            f"it takes 32 or 64 index heads, this model has {request.index_heads}": (
                request.index_heads not in DEEPGEMM_INDEX_HEADS
            ),
        }
    )
    return refusal or library_problem(load_deep_gemm)
