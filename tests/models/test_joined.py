"""Joined matrices: the parts' products, and places under the checkpoint's names."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from echokv.models.joined import Joined
from echokv.models.matrices import Matrices

PARTS = {"a": 160, "below.b": 128, "c": 70}


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """In float32, without quantising x."""
    wide = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
    return x @ (weight.float() * wide).T


def test_parts_are_multiplied_as_if_alone() -> None:
    joined = Joined(PARTS, 256, Matrices(dtype=torch.float32))
    joined.weight.copy_(torch.randn(358, 256))
    x = torch.randn(5, 256)
    results = joined(x)
    places = joined.parts()
    assert list(places) == ["a.weight", "below.b.weight", "c.weight"]
    for (name, place), result in zip(places.items(), results, strict=True):
        assert place.shape == (PARTS[name.removesuffix(".weight")], 256)
        assert torch.equal(result, torch.nn.functional.linear(x, place))
    assert joined.places() == {}, "the holder names them"


def test_fp8_parts_have_scales_of_their_own() -> None:
    kernels = SimpleNamespace(fp8_linear=fp8_linear)
    matrices = Matrices(dtype=torch.float32, keep_fp8=True, kernels=kernels)  # type: ignore[arg-type]
    joined = Joined(PARTS, 256, matrices)
    places = joined.parts()
    assert places["a.weight_scale_inv"].shape == (2, 2)
    assert places["below.b.weight_scale_inv"].shape == (1, 2)
    assert places["c.weight_scale_inv"].shape == (1, 2)
    joined.weight.copy_(torch.zeros(joined.weight.shape))
    for number, place in enumerate(places.values(), start=1):
        values = torch.full(place.shape, float(number))
        place.copy_(values if place.dtype == torch.float32 else torch.randn(place.shape))
    x = torch.randn(3, 256)
    for (name, rows), result in zip(PARTS.items(), joined(x), strict=True):
        weight, scale = places[f"{name}.weight"], places[f"{name}.weight_scale_inv"]
        assert weight.shape == (rows, 256) and scale.unique().numel() == 1
        expected = x @ weight.float().T * scale[0, 0]
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("stored", ["a", "c"])
def test_parts_of_which_one_is_not_fp8_are_not(stored: str) -> None:
    def is_fp8(name: str) -> bool:
        return name != f"model.{stored}.weight"

    matrices = Matrices(dtype=torch.bfloat16, keep_fp8=True, is_fp8=is_fp8)
    joined = Joined(PARTS, 256, matrices)
    assert joined.weight.dtype == torch.bfloat16 and joined.weight.shape == (358, 256)
    assert not any(name.endswith("scale_inv") for name in joined.parts())
