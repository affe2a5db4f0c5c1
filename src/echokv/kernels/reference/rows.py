"""Latent KV rows to bytes and back (`memory.formats.RowFormat` says what the formats are)."""

import torch
from torch import Tensor

from echokv.kernels.checks import FLOATS, check_tensor
from echokv.memory.formats import FP8_GROUP, RowFormat

FP8_MAX = 448.0
"""Largest finite e4m3 value."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scale of a group of zeros: any positive number decodes to the same zeros."""

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def encode_rows(latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
    """Pack rows into the bytes that the pools hold.

    `fp8_ds_mla` follows FlashMLA's V3.2 layout: a group of 128 latent values has one fp32 scale,
    its largest magnitude / 448 (not rounded to a power of two), and is stored as value / scale in
    e4m3, rounded to nearest even.

    Args:
        latent: [T, latent_dim] float.
        rope: [T, rope_dim] float, same dtype as latent.
        fmt: how to pack.

    Returns:
        [T, row_bytes] uint8.
    """
    check_encode_args(latent, rope, fmt)
    if fmt.name in _PLAIN:
        return torch.cat([latent, rope], dim=1).to(_PLAIN[fmt.name]).view(torch.uint8)
    num_groups = fmt.latent_dim // FP8_GROUP
    groups = latent.float().unflatten(1, (num_groups, FP8_GROUP))  # [T, G, 128]
    scales = (groups.abs().amax(dim=2) / FP8_MAX).clamp(min=SMALLEST_SCALE)  # [T, G]
    values = (groups / scales[:, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat(
        [
            values.view(torch.uint8).flatten(1),
            scales.view(torch.uint8),
            rope.to(torch.bfloat16).contiguous().view(torch.uint8),
        ],
        dim=1,
    )


def decode_rows(rows: Tensor, fmt: RowFormat, dtype: torch.dtype) -> Tensor:
    """Unpack rows: what the stored bytes stand for.

    Args:
        rows: [..., row_bytes] uint8.
        fmt: how they were packed.
        dtype: what to return; products of value and scale are rounded from fp32.

    Returns:
        [..., latent_dim + rope_dim], latent then rope.
    """
    check_decode_args(rows, fmt)
    if fmt.name in _PLAIN:
        return rows.view(_PLAIN[fmt.name]).to(dtype)
    latent_dim, num_groups = fmt.latent_dim, fmt.latent_dim // FP8_GROUP
    values, scales, rope = rows.split([latent_dim, 4 * num_groups, 2 * fmt.rope_dim], dim=-1)
    groups = values.view(torch.float8_e4m3fn).float().unflatten(-1, (num_groups, FP8_GROUP))
    latent = groups * scales.contiguous().view(torch.float32)[..., None]
    rope = rope.contiguous().view(torch.bfloat16)
    return torch.cat([latent.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)


def check_encode_args(latent: Tensor, rope: Tensor, fmt: RowFormat) -> None:
    """Raise ValueError unless `encode_rows` can take these."""
    check_tensor("latent", latent, (None, fmt.latent_dim), FLOATS)
    shape = (latent.shape[0], fmt.rope_dim)
    check_tensor("rope", rope, shape, latent.dtype, device=latent.device)


def check_decode_args(rows: Tensor, fmt: RowFormat) -> None:
    """Raise ValueError unless `decode_rows` can take these."""
    check_tensor("rows", rows, (*[None] * (rows.dim() - 1), fmt.row_bytes), torch.uint8)
