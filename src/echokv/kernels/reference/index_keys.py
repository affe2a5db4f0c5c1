"""Indexer keys: rotation, quantisation, and writing them into pages of 64 tokens.

Follows DeepSeek-V3.2's reference inference code as fixed in November 2025: `rotate_activation`
(a scaled Hadamard transform), then `act_quant` with power-of-two (ue8m0) scales.
"""

import torch
from torch import Tensor

from echokv.errors import ConfigError
from echokv.kernels.checks import FLOATS, check_tensor
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import BLOCK_TOKENS

FP8_MAX = 448.0
"""Largest finite e4m3 value."""

SMALLEST_AMAX = 1e-4
"""Magnitudes below this count as this when the scale is chosen, as in `act_quant`."""

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write_index_keys(keys: Tensor, host_slots: Tensor, pages: Tensor, fmt: IndexKeyFormat) -> None:
    """Store each token's indexer key at its host slot, in place.

    `fp8` rotates and quantises first (`rotate`, `quantise_ue8m0`).

    Args:
        keys: [T, D] float.
        host_slots: [T] int32, distinct; -1 writes nothing.
        pages: [n_pages, page_bytes] uint8 of one layer; page id == host block id.
        fmt: how to store.
    """
    check_write_args(keys, host_slots, pages, fmt)
    kept = host_slots >= 0
    slots = host_slots[kept].long()
    page, offset = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    if fmt.name in _PLAIN:
        plain = page_values(pages, fmt)  # [n_pages, 64, D]
        plain[page, offset] = keys[kept].to(plain.dtype)
        return
    values, scales = quantise_ue8m0(rotate(keys[kept]))
    page_values(pages, fmt).view(torch.uint8)[page, offset] = values.view(torch.uint8)
    page_scales(pages, fmt)[page, offset] = scales


def page_values(pages: Tensor, fmt: IndexKeyFormat) -> Tensor:
    """The keys of pages as a view: [n_pages, 64, D] in the format's dtype (e4m3 for fp8)."""
    shape = (BLOCK_TOKENS, fmt.head_dim)
    if fmt.name in _PLAIN:
        plain: Tensor = pages.view(_PLAIN[fmt.name]).unflatten(1, shape)
        return plain
    values: Tensor = pages[:, : BLOCK_TOKENS * fmt.head_dim].unflatten(1, shape)
    return values.view(torch.float8_e4m3fn)


def page_scales(pages: Tensor, fmt: IndexKeyFormat) -> Tensor:
    """The scales of fp8 pages as a view: [n_pages, 64] float32."""
    return pages[:, BLOCK_TOKENS * fmt.head_dim :].view(torch.float32)


def rotate(x: Tensor) -> Tensor:
    """Hadamard transform of the last dimension, times its size ** -0.5; fp32 inside.

    Args:
        x: [..., D] float, D a power of two.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ConfigError: D is not a power of two.
    """
    size = x.shape[-1]
    check_rotatable(size)
    out = x.float()
    step = 1
    while step < size:
        pairs = out.unflatten(-1, (size // (2 * step), 2, step))
        left, right = pairs.unbind(-2)
        out = torch.stack([left + right, left - right], dim=-2).flatten(-3)
        step *= 2
    rotated: Tensor = (out * size**-0.5).to(x.dtype)
    return rotated


def quantise_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each last-dimension row to e4m3 with one power-of-two scale.

    The scale is the least power of two not below max|x| / 448.

    Args:
        x: [..., D] float.

    Returns:
        [..., D] float8_e4m3fn, and [...] float32 scales.
    """
    x = x.float()
    amax = x.abs().amax(dim=-1).clamp(min=SMALLEST_AMAX)
    mantissa, exponent = torch.frexp(amax * (1.0 / FP8_MAX))  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scales = torch.ldexp(torch.ones_like(amax), exponent)
    values = (x / scales[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return values.to(torch.float8_e4m3fn), scales


def check_rotatable(size: int) -> None:
    """Raise ConfigError unless a Hadamard transform of this size exists here."""
    if size & (size - 1):
        raise ConfigError(
            f"--index-key-dtype fp8 needs an index_head_dim that is a power of two, not {size};"
            " use bfloat16"
        )


def check_write_args(keys: Tensor, host_slots: Tensor, pages: Tensor, fmt: IndexKeyFormat) -> None:
    """Raise ValueError unless `write_index_keys` can take these."""
    check_tensor("keys", keys, (None, fmt.head_dim), FLOATS)
    check_tensor("host_slots", host_slots, (keys.shape[0],), torch.int32, device=keys.device)
    check_tensor("pages", pages, (None, fmt.page_bytes), torch.uint8, device=keys.device)
