"""Routing and experts against Hugging Face's modules and against each other."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Experts,
    DeepseekV32TopkRouter,
)

from echokv.config import ModelConfig
from echokv.models.matrices import Matrices
from echokv.models.moe import Experts, MoE, Router
from echokv.models.random_checkpoint import CONFIG

HIDDEN, INNER = 96, 64


def config(experts: int, groups: int, topk_group: int, chosen: int, *, norm: bool) -> ModelConfig:
    return replace(
        ModelConfig.from_dict(CONFIG),
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=topk_group,
        num_experts_per_tok=chosen,
        norm_topk_prob=norm,
    )


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(weights: Tensor, experts: Tensor, total: int) -> Tensor:
    """[T, E]: the weight that each expert gets from each token."""
    return torch.zeros(weights.shape[0], total).scatter(1, experts, weights)


@pytest.mark.parametrize(
    ("experts", "groups", "topk_group", "chosen", "norm"),
    [(8, 4, 2, 2, True), (32, 8, 4, 8, True), (12, 1, 1, 3, False), (6, 3, 1, 2, True)],
)
def test_router_is_hfs(experts: int, groups: int, topk_group: int, chosen: int, norm: bool) -> None:
    ours = config(experts, groups, topk_group, chosen, norm=norm)
    theirs = DeepseekV32TopkRouter(
        DeepseekV32Config(
            hidden_size=HIDDEN,
            n_routed_experts=experts,
            n_group=groups,
            topk_group=topk_group,
            num_experts_per_tok=chosen,
            norm_topk_prob=norm,
            routed_scaling_factor=ours.routed_scaling_factor,
        )
    )
    router = Router(ours)
    router.weight.copy_(noise(1, experts, HIDDEN) * HIDDEN**-0.5)
    router.e_score_correction_bias.copy_(noise(2, experts))  # large enough to change choices
    theirs.load_state_dict(router.state_dict())
    x = noise(3, 257, HIDDEN)
    weights, picked = router(x)
    with torch.no_grad():
        _, their_weights, their_picked = theirs(x)
    assert torch.equal(picked.sort(1).values, their_picked.sort(1).values)
    torch.testing.assert_close(
        dense(weights, picked, experts), dense(their_weights, their_picked, experts)
    )


def test_correction_bias_chooses_but_does_not_weigh() -> None:
    router = Router(config(4, 1, 1, 1, norm=False))
    router.weight.zero_()
    router.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    weights, picked = router(noise(0, 5, HIDDEN))
    assert picked.flatten().tolist() == [2] * 5
    assert torch.equal(weights, torch.full((5, 1), 0.5 * 2.5))  # sigmoid(0) times the scale


def filled_experts(token_tile: int | None, dtype: torch.dtype = torch.float32) -> Experts:
    experts = Experts(config(8, 1, 1, 3, norm=True), dtype, token_tile)
    experts.gate_up_proj.copy_(noise(4, 8, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
    experts.down_proj.copy_(noise(5, 8, HIDDEN, INNER) * INNER**-0.5)
    return experts


def random_choice(seed: int, tokens: int, experts: int = 8) -> Tensor:
    return noise(seed, tokens, experts).argsort(1)[:, :3]


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("token_tile", [32, None])
def test_experts_are_hfs(tokens: int, token_tile: int | None) -> None:
    ours = filled_experts(token_tile)
    theirs = DeepseekV32Experts(
        DeepseekV32Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            n_routed_experts=8,
            experts_implementation="eager",
        )
    )
    theirs.load_state_dict(ours.state_dict())
    x, picked = noise(6, tokens, HIDDEN), random_choice(7, tokens)
    weights = noise(8, tokens, 3).sigmoid()
    with torch.no_grad():
        expected = theirs(x, picked, weights)
    torch.testing.assert_close(ours(x, picked, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_grouped_is_looped(dtype: torch.dtype, tokens: int) -> None:
    """Also with experts that nobody chose, first and last among them."""
    experts = filled_experts(None, dtype)
    x = noise(9, tokens, HIDDEN).to(dtype)
    picked = 1 + random_choice(10, tokens, 6)
    torch.testing.assert_close(experts.grouped(x, picked), experts.looped(x, picked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_gives_a_token_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    moe = MoE(config(8, 4, 2, 2, norm=True), Matrices(dtype=dtype, token_tile=32))
    for seed, parameter in enumerate(moe.parameters()):
        parameter.copy_(noise(seed, *parameter.shape) * parameter.shape[-1] ** -0.5)
    x = noise(50, 32, HIDDEN).to(dtype)
    together = moe(x)
    for row in (0, 13, 31):
        alone = torch.zeros_like(x)
        alone[5] = x[row]
        assert torch.equal(moe(alone)[5], together[row])
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(moe(x[order]), together[order])
