"""Index keys in pages, against DeepSeek's quantisation written down independently."""

from typing import Any

import numpy as np
import pytest
import torch

from echokv.errors import ConfigError
from echokv.memory.formats import IndexKeyFormat

POISON = 0xFF  # NaN as fp32, as bf16 and as e4m3


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix of signs, unscaled: entry (i, j) is -1 to the number of common bits."""
    common = np.arange(size)[:, None] & np.arange(size)
    return 1.0 - 2.0 * (np.array([[bin(c).count("1") for c in row] for row in common]) % 2)


def rotate_and_quantise(e4m3: Any, keys: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """`rotate_activation` then `act_quant(scale_fmt="ue8m0")`.

    Exact for keys of small integers: then the sums are exact and every rounding left is one
    float32 (or bf16) operation.
    """
    size = keys.shape[-1]
    sums = (keys.double().numpy() @ hadamard(size)).astype(np.float32)
    rotated = torch.from_numpy(sums * np.float32(size**-0.5)).to(keys.dtype).float().numpy()
    amax = np.maximum(np.abs(rotated).max(axis=-1), np.float32(1e-4))
    scales = 2.0 ** np.ceil(np.log2(amax.astype(np.float64) / 448))
    return e4m3.encode(rotated / scales[..., None]), scales.astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [128, 64, 32])
def test_fp8_pages_are_the_bytes_of_the_layout(
    backend: Any, e4m3: Any, dim: int, dtype: torch.dtype
) -> None:
    fmt = IndexKeyFormat(name="fp8", head_dim=dim)
    keys = torch.randint(-9, 10, (70, dim)).to(dtype)
    keys[3] = 0
    keys[4] = 0
    keys[4, 0] = 448  # rotates to one magnitude everywhere: at dim 64, a scale of exactly 2 ** -3
    slots = (torch.randperm(3 * 64)[:70]).to(torch.int32)
    slots[5] = -1
    pages = torch.full((3, fmt.page_bytes), POISON, dtype=torch.uint8)
    expected = pages.clone().numpy()
    codes, scales = rotate_and_quantise(e4m3, keys)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, at = expected[slot // 64], slot % 64
            page[at * dim : (at + 1) * dim] = codes[token]
            scale_at = 64 * dim + 4 * at
            page[scale_at : scale_at + 4] = scales[token : token + 1].view(np.uint8)

    pages = pages.to(backend.device)
    backend.op("write_index_keys")(keys.to(pages.device), slots.to(pages.device), pages, fmt)
    np.testing.assert_array_equal(pages.cpu().numpy(), expected)


def test_fp8_keys_keep_their_products(backend: Any, e4m3: Any) -> None:
    """Rotation preserves dot products; quantisation costs no more than e4m3's resolution."""
    fmt = IndexKeyFormat(name="fp8", head_dim=128)
    keys = torch.randn(64, 128) * torch.logspace(-4, 4, 64)[:, None]
    pages = torch.full((1, fmt.page_bytes), POISON, dtype=torch.uint8, device=backend.device)
    slots = torch.arange(64, dtype=torch.int32, device=backend.device)
    backend.op("write_index_keys")(keys.to(backend.device), slots, pages, fmt)
    page = pages[0].cpu().numpy()
    scales = page[64 * 128 :].copy().view(np.float32).astype(np.float64)
    stored = e4m3.decode(page[: 64 * 128].reshape(64, 128)) * scales[:, None]
    error = stored @ hadamard(128) / 128**0.5 - keys.numpy()
    assert (np.abs(error).max(axis=1) <= 0.05 * np.abs(keys.numpy()).max(axis=1)).all()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [128, 40])
def test_plain_pages_hold_the_keys(backend: Any, name: str, dim: int) -> None:
    fmt = IndexKeyFormat(name=name, head_dim=dim)
    dtype = getattr(torch, name)
    keys = torch.randn(65, dim)
    slots = torch.randperm(2 * 64)[:65].to(torch.int32)
    slots[[0, 64]] = -1
    expected = torch.full((2, fmt.page_bytes), POISON, dtype=torch.uint8)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.view(dtype).view(128, dim)[slot] = keys[token].to(dtype)
    pages = torch.full_like(expected, POISON).to(backend.device)
    backend.op("write_index_keys")(keys.to(pages.device), slots.to(pages.device), pages, fmt)
    assert torch.equal(pages.cpu(), expected)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
def test_no_token_or_only_padding_writes_nothing(backend: Any, name: str) -> None:
    fmt = IndexKeyFormat(name=name, head_dim=64)
    pages = torch.full((1, fmt.page_bytes), POISON, dtype=torch.uint8, device=backend.device)
    for tokens in (0, 3):
        keys = torch.zeros(tokens, 64, device=backend.device)
        slots = torch.full((tokens,), -1, dtype=torch.int32, device=backend.device)
        backend.op("write_index_keys")(keys, slots, pages, fmt)
    assert (pages == POISON).all()


def test_fp8_needs_a_power_of_two(backend: Any) -> None:
    fmt = IndexKeyFormat(name="fp8", head_dim=96)
    pages = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8, device=backend.device)
    slots = torch.zeros(1, dtype=torch.int32, device=backend.device)
    with pytest.raises(ConfigError, match="power of two, not 96"):
        backend.op("write_index_keys")(torch.ones(1, 96, device=pages.device), slots, pages, fmt)


def test_keys_past_4_gib_land_where_they_belong(backend: Any, lazy_bytes: Any) -> None:
    fmt = IndexKeyFormat(name="fp8", head_dim=128)
    num_pages = 2**32 // fmt.page_bytes + 2
    pages = lazy_bytes(num_pages * fmt.page_bytes, backend.device).view(num_pages, -1)
    page_ids = torch.tensor([0, 2**31 // fmt.page_bytes + 1, num_pages - 1])
    slots = (page_ids * 64 + 17).to(torch.int32)
    keys = torch.randint(-9, 10, (3, 128)).float()
    backend.op("write_index_keys")(keys.to(pages.device), slots.to(pages.device), pages, fmt)
    small = torch.zeros(3, fmt.page_bytes, dtype=torch.uint8, device=backend.device)
    near = torch.arange(3, dtype=torch.int32, device=backend.device) * 64 + 17
    backend.op("write_index_keys")(keys.to(pages.device), near, small, fmt)
    assert torch.equal(pages[page_ids.to(pages.device)], small)
