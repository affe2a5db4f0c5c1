"""Rows to bytes and back, against e4m3 and the layout written down independently."""

from typing import Any

import numpy as np
import pytest
import torch

from echokv.memory.formats import RowFormat

SHAPES = [(512, 64), (128, 32), (384, 16)]


def fp8_row_bytes(e4m3: Any, latent: np.ndarray, rope: torch.Tensor) -> np.ndarray:
    """FlashMLA's V3.2 row, group by group: 128 codes each, then the scales, then bf16 rope."""
    codes, scales = [], []
    for group in np.split(latent, latent.shape[1] // 128, axis=1):
        scale = np.abs(group).max(axis=1) / np.float32(448)
        scale = np.maximum(scale, np.finfo(np.float32).tiny)
        codes.append(e4m3.encode(group / scale[:, None]))
        scales.append(scale)
    rope_bytes = rope.bfloat16().view(torch.uint8).numpy()
    return np.concatenate([*codes, np.stack(scales, axis=1).view(np.uint8), rope_bytes], axis=1)


def hostile_latent(tokens: int, dim: int) -> torch.Tensor:
    """Rows of very different sizes; zeros, exact ties between codes, and subnormal codes."""
    latent = torch.randn(tokens, dim) * torch.logspace(-6, 6, tokens)[:, None]
    latent[::5, :128] = 0
    latent[1::5, :128] = torch.arange(128) - 64.0
    latent[1::5, 0] = 448.0
    latent[2::5, :128] *= torch.logspace(-8, 0, 128)
    return latent


@pytest.mark.parametrize("latent_dim, rope_dim", SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_fp8_rows_are_the_bytes_of_the_layout(
    backend: Any, e4m3: Any, tokens: int, latent_dim: int, rope_dim: int
) -> None:
    fmt = RowFormat(name="fp8_ds_mla", latent_dim=latent_dim, rope_dim=rope_dim)
    latent, rope = hostile_latent(tokens, latent_dim), torch.randn(tokens, rope_dim)
    rows = backend.op("encode_rows")(latent.to(backend.device), rope.to(backend.device), fmt)
    assert rows.shape == (tokens, fmt.row_bytes)
    expected = fp8_row_bytes(e4m3, latent.numpy(), rope)
    np.testing.assert_array_equal(rows.cpu().numpy(), expected)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_are_latent_then_rope(backend: Any, name: str, dtype: torch.dtype) -> None:
    fmt = RowFormat(name=name, latent_dim=40, rope_dim=24)
    latent, rope = torch.randn(33, 40).to(dtype), torch.randn(33, 24).to(dtype)
    rows = backend.op("encode_rows")(latent.to(backend.device), rope.to(backend.device), fmt)
    assert rows.shape == (33, fmt.row_bytes) and rows.dtype == torch.uint8
    expected = torch.cat([latent, rope], 1).to(getattr(torch, name))
    assert torch.equal(rows.cpu().view(expected.dtype), expected)
    decoded = backend.op("decode_rows")(rows, fmt, torch.float32)
    assert torch.equal(decoded.cpu(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("latent_dim, rope_dim", SHAPES)
def test_fp8_rows_decode_to_code_times_scale(
    backend: Any, e4m3: Any, latent_dim: int, rope_dim: int, dtype: torch.dtype
) -> None:
    fmt = RowFormat(name="fp8_ds_mla", latent_dim=latent_dim, rope_dim=rope_dim)
    latent, rope = hostile_latent(7, latent_dim), torch.randn(7, rope_dim)
    rows = torch.from_numpy(fp8_row_bytes(e4m3, latent.numpy(), rope)).to(backend.device)
    decoded = backend.op("decode_rows")(rows, fmt, dtype).cpu()

    codes = rows[:, :latent_dim].cpu().numpy()
    scales = rows[:, latent_dim:].cpu().contiguous().numpy()[:, : latent_dim // 32].copy()
    scales = np.repeat(scales.view(np.float32).astype(np.float64), 128, axis=1)
    expected = torch.from_numpy(e4m3.decode(codes) * scales).float().to(dtype)
    assert torch.equal(decoded[:, :latent_dim], expected)
    assert torch.equal(decoded[:, latent_dim:], rope.bfloat16().to(dtype))
    error = (decoded[:, :latent_dim].float() - latent).abs().numpy()
    assert (error <= 16.01 * scales + np.abs(latent.numpy()) * 2.0**-8).all()


def test_rows_decode_with_any_leading_shape(backend: Any) -> None:
    fmt = RowFormat(name="fp8_ds_mla", latent_dim=128, rope_dim=32)
    latent, rope = torch.randn(6, 128), torch.randn(6, 32)
    rows = backend.op("encode_rows")(latent.to(backend.device), rope.to(backend.device), fmt)
    flat = backend.op("decode_rows")(rows, fmt, torch.float32)
    cube = backend.op("decode_rows")(rows.view(2, 3, -1), fmt, torch.float32)
    assert torch.equal(cube.flatten(0, 1), flat)


def test_rows_refuse_what_does_not_fit(backend: Any) -> None:
    fmt = RowFormat(name="bfloat16", latent_dim=32, rope_dim=16)
    encode = backend.op("encode_rows")
    latent, rope = torch.zeros(4, 32, device=backend.device), torch.zeros(4, 16)
    rope = rope.to(backend.device)
    with pytest.raises(ValueError, match=r"latent must have shape \[\*, 32\], got \[4, 31\]"):
        encode(latent[:, :31], rope, fmt)
    with pytest.raises(ValueError, match=r"rope must have shape \[4, 16\], got \[3, 16\]"):
        encode(latent, rope[:3], fmt)
    with pytest.raises(ValueError, match="contiguous"):
        encode(torch.zeros(32, 4, device=backend.device).T, rope, fmt)
    with pytest.raises(ValueError, match=r"float32 or .*bfloat16, got torch.int32"):
        encode(latent.int(), rope, fmt)
