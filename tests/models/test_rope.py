"""Rotary embedding against complex multiplication and against Hugging Face's YaRN."""

import math

import pytest
import torch
from transformers import DeepseekV32Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from echokv.config import ModelConfig, RopeConfig
from echokv.kernels.reference.rotary import rotated
from echokv.models.random_checkpoint import CONFIG
from echokv.models.rope import Rope, inverse_frequencies

CPU = torch.device("cpu")
YARN = ModelConfig.from_dict(CONFIG).rope


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 40, "original_max_position_embeddings": 4096},
        {"factor": 4, "original_max_position_embeddings": 32768, "beta_fast": 16, "beta_slow": 2},
        {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.7},
        {"factor": 8, "original_max_position_embeddings": 64, "beta_slow": 30},  # no ramp
    ],
)
@pytest.mark.parametrize("dim", [32, 64])
def test_yarn_is_hfs(scaling: dict[str, float], dim: int) -> None:
    spec = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **scaling}
    ours = ModelConfig.from_dict({**CONFIG, "rope_scaling": spec, "qk_rope_head_dim": dim}).rope
    theirs = DeepseekV32Config(
        qk_rope_head_dim=dim,
        max_position_embeddings=spec["factor"] * spec["original_max_position_embeddings"],
        rope_parameters={**spec, "rope_type": "yarn", "rope_theta": 10000.0},
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    torch.testing.assert_close(inverse_frequencies(ours, dim), expected, rtol=1e-6, atol=0)
    cos, sin = Rope(ours, dim, CPU).angles(torch.tensor([0], dtype=torch.int32))
    torch.testing.assert_close(cos, torch.full((1, dim // 2), magnitude))
    assert not sin.any()


def test_plain_frequencies() -> None:
    ours = inverse_frequencies(RopeConfig(theta=1e6), 8).double()
    expected = torch.tensor([1e6 ** (-pair / 4) for pair in range(4)], dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain = inverse_frequencies(RopeConfig(theta=YARN.theta), 64)
    ratio = inverse_frequencies(YARN, 64) / plain
    assert ratio[0] == 1
    assert math.isclose(ratio[-1], 1 / 40, rel_tol=1e-6)
    assert (ratio.diff() <= 1e-7).all()


@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64)])
def test_rotation_is_multiplication_by_a_complex_unit(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 63, 4097, 163839], dtype=torch.int32)
    cos, sin = Rope(YARN, 64, CPU).angles(positions)
    turn = torch.complex(cos, sin).view(5, *[1] * (len(shape) - 2), 32)
    pairs = x.view(*shape[:-1], 32, 2)
    expected = torch.view_as_real(torch.complex(*pairs.unbind(-1)) * turn).flatten(-2)
    torch.testing.assert_close(rotated(x, cos, sin, interleaved=True), expected)
    halves = torch.complex(*x.chunk(2, -1)) * turn
    expected = torch.cat((halves.real, halves.imag), -1)
    torch.testing.assert_close(rotated(x, cos, sin, interleaved=False), expected)


def test_bfloat16_is_rotated_in_float32() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = Rope(YARN, 64, CPU).angles(torch.arange(4, dtype=torch.int32))
    for interleaved in (False, True):
        narrow, wide = (rotated(t, *angles, interleaved=interleaved) for t in (x, x.float()))
        assert torch.equal(narrow, wide.bfloat16())
