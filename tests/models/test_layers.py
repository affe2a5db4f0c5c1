"""Norms and the gated MLP against their formulas in float64."""

import pytest
import torch
from torch import Tensor, nn

from echokv.models.layers import GatedMLP, RMSNorm


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def sample(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(2)) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 63, 128])
def test_rms_norm(dtype: torch.dtype, dim: int) -> None:
    norm, x = filled(RMSNorm(dim, 1e-5)), sample(7, dim).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), expected.to(dtype))


def test_gated_mlp() -> None:
    mlp, x = filled(GatedMLP(48, 80, torch.float32)), 0.1 * sample(5, 48)
    gate, up = (x.double() @ place.double().T for place in mlp.places().values())
    expected = (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.double().T
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-3)


def test_nothing_trains() -> None:
    mlp = GatedMLP(8, 8, torch.float32)
    assert not any(parameter.requires_grad for parameter in mlp.parameters())
