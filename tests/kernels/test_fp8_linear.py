"""Products with block-fp8 weights, against fp64 products of the very values that fp8 holds."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from echokv.kernels.reference.fp8_linear import quantise_activations

ROWS = [1, 15, 17, 33, 65, 130]


def fp8_weight(device: torch.device, *shape: int) -> tuple[Tensor, Tensor]:
    """Random e4m3 values [..., N, K] and scales of their blocks, very unequal ones."""
    *stack, rows, columns = shape
    values = (80 * torch.randn(shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.exp(torch.randn(*stack, -(-rows // 128), columns // 128)) * 1e-4
    return values.to(device), scales.to(device)


def activations(device: torch.device, *shape: int) -> Tensor:
    """Groups of very unequal size, one of them zero."""
    groups = torch.randn(*shape[:-1], shape[-1] // 128, 128)
    groups *= torch.exp(2 * torch.randn(*groups.shape[:-1], 1))
    groups.view(-1, 128)[:1] = 0
    return groups.flatten(-2).to(torch.bfloat16).to(device)


def exact_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """What a weight stands for, in fp64 on the CPU."""
    rows, columns = weight.shape
    spread = scale.cpu().double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.cpu().double() * spread[:rows, :columns]


def exact_activations(x: Tensor) -> Tensor:
    """What x stands for once quantised, in fp64 on the CPU."""
    values, scales = quantise_activations(x.cpu())
    return values.double() * scales.double().repeat_interleave(128, -1)


def assert_close(out: Tensor, exact: Tensor, plain: Tensor) -> None:
    """At most twice the error of bf16 PyTorch, and a rounding of the result."""
    rounding = 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    allowed = 2 * (plain.double() - exact).abs().max() + rounding
    assert (out.cpu().double() - exact).abs().max() <= allowed


def check_linear(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> None:
    values, matrix = exact_activations(x), exact_weight(weight, scale)
    plain = functional.linear(values.bfloat16(), matrix.bfloat16())
    assert_close(out, functional.linear(values, matrix), plain)


def check_gate_up(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> None:
    values, matrix = exact_activations(x), exact_weight(weight, scale)

    def gated(dtype: torch.dtype) -> Tensor:
        gate, up = functional.linear(values.to(dtype), matrix.to(dtype)).chunk(2, -1)
        return functional.silu(gate) * up

    assert_close(out, gated(torch.float64), gated(torch.bfloat16))


def test_activations_are_rounded_to_the_nearest_code(e4m3: Any) -> None:
    x = activations(torch.device("cpu"), 40, 256)
    values, scales = quantise_activations(x)
    groups = x.double().numpy().reshape(40, 2, 128)
    amax = np.maximum(np.abs(groups).max(2), 1e-4).astype(np.float32)
    assert np.array_equal(scales.numpy(), amax / np.float32(448))
    scaled = groups.astype(np.float32) * (np.float32(448) / amax)[..., None]
    codes = e4m3.encode(scaled.clip(-448, 448)).reshape(40, 256)
    assert np.array_equal(values.view(torch.uint8).numpy(), codes)


def test_triton_quantises_to_the_same_bytes(backend: Any) -> None:
    if backend.name != "triton":
        pytest.skip("a step of the Triton kernels only")
    from echokv.kernels.triton.fp8_product import quantise

    x = activations(backend.device, 19, 384)
    values, scales = quantise(x)
    expected, expected_scales = quantise_activations(x.cpu())
    assert torch.equal(values.view(torch.uint8).cpu(), expected.view(torch.uint8))
    assert torch.equal(scales.cpu(), expected_scales)
    assert scales.stride() == (1, 20), "columns padded to multiples of 4"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns, width", [(100, 128), (384, 256)])
def test_linear(backend: Any, rows: int, columns: int, width: int) -> None:
    x = activations(backend.device, rows, width)
    weight, scale = fp8_weight(backend.device, columns, width)
    out = backend.op("fp8_linear")(x, weight, scale)
    assert out.shape == (rows, columns) and out.dtype == torch.bfloat16
    check_linear(x, weight, scale, out)


@pytest.mark.parametrize("rows", ROWS)
def test_gate_up(backend: Any, rows: int) -> None:
    x = activations(backend.device, rows, 256)
    weight, scale = fp8_weight(backend.device, 512, 256)
    out = backend.op("fp8_gate_up")(x, weight, scale)
    assert out.shape == (rows, 256) and out.dtype == torch.bfloat16
    check_gate_up(x, weight, scale, out)


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 16, "columns": 32, "splits": 3},
        {"rows": 16, "columns": 64, "splits": 2, "swapped": True},
        {"rows": 64, "columns": 64, "quantised": True},
        {"rows": 16, "columns": 128, "quantised": True, "swapped": True},
        {"rows": 16, "columns": 128, "splits": 3, "swapped": True},
    ],
)
def test_every_way_to_cut_gives_the_product(backend: Any, options: dict[str, Any]) -> None:
    if backend.name != "triton":
        pytest.skip("a choice of the Triton kernels only")
    from echokv.kernels.triton.fp8_product import Tiles, product

    tiles = Tiles(stages=3, **options)
    x = activations(backend.device, 18, 768)
    weight, scale = fp8_weight(backend.device, 256, 768)
    check_linear(x, weight, scale, product(x, weight, scale, tiles))
    check_gate_up(x, weight, scale, product(x, weight, scale, tiles, gated=True))


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_divide_any_product(rows: int, gated: bool) -> None:
    from echokv.kernels.triton.fp8_linear import linear_tiles

    for blocks in (1, 7, 12, 16, 28, 56, 113, 144):
        for columns in (128, 576, 2240, 24_576):
            tiles = linear_tiles(rows, columns, 128 * blocks, gated=gated)
            assert blocks % tiles.splits == 0
            assert tiles.splits == 1 or blocks // tiles.splits >= 4
            assert tiles.rows >= rows or rows > 64


def test_leading_dimensions_stay(backend: Any) -> None:
    weight, scale = fp8_weight(backend.device, 128, 128)
    x = activations(backend.device, 2, 3, 128)
    out = backend.op("fp8_linear")(x, weight, scale)
    assert out.shape == (2, 3, 128)
    assert backend.op("fp8_linear")(x[:0], weight, scale).shape == (0, 3, 128)


def test_products_refuse_what_does_not_fit(backend: Any) -> None:
    weight, scale = fp8_weight(backend.device, 128, 128)
    x = activations(backend.device, 2, 128)
    op = backend.op("fp8_linear")
    with pytest.raises(ValueError, match=r"x must be torch.bfloat16, got torch.float32"):
        op(x.float(), weight, scale)
    with pytest.raises(ValueError, match=r"scale must have shape \[1, 1\], got \[2, 1\]"):
        op(x, weight, scale.repeat(2, 1))
    with pytest.raises(ValueError, match=r"blocks of 128, got 64"):
        op(x[:, :64].contiguous(), weight[:, :64].contiguous(), scale)
    with pytest.raises(ValueError, match=r"128 x n rows each, together they have 128"):
        backend.op("fp8_gate_up")(x, weight, scale)
