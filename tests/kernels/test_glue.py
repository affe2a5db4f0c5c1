"""The small ops between the model's products, each against its formula in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(*shape) + 0.5).to(dtype)


def angles(tokens: int, half: int) -> tuple[Tensor, Tensor]:
    turns = torch.rand(tokens, half) * 6.28
    return turns.cos(), turns.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x [T, H, R] in float64, rotated as complex numbers."""
    turn = torch.complex(cos.double(), sin.double())[:, None]
    if interleaved:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)
    first, second = x.double().chunk(2, -1)
    result = torch.complex(first, second) * turn
    return torch.cat((result.real, result.imag), -1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within two roundings of dtype."""
    assert got.dtype == dtype
    step = 2.0**-7 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.double().cpu(), expected, rtol=step, atol=step * 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(0, 64), (1, 1), (3, 63), (5, 1536)])
def test_rms_norm(backend: Any, dtype: torch.dtype, tokens: int, dim: int) -> None:
    x, weight = noise(tokens, dim, dtype=dtype), noise(dim)
    got = backend.op("rms_norm")(x.to(backend.device), weight.to(backend.device), 1e-5)
    assert_close(got, rms(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(0, 64), (1, 40), (4, 321)])
def test_residual_then_norm(backend: Any, dtype: torch.dtype, tokens: int, dim: int) -> None:
    x, delta, weight = noise(tokens, dim, dtype=dtype), noise(tokens, dim, dtype=dtype), noise(dim)
    there = (tensor.to(backend.device) for tensor in (x, delta, weight))
    total, normed = backend.op("add_rms_norm")(*there, 1e-6)
    assert torch.equal(total.cpu(), x + delta), "the sum is rounded once"
    assert_close(normed, rms(x + delta, weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("q_rank, latent, half", [(96, 64, 16), (48, 130, 20)])
def test_mla_latents(
    backend: Any, dtype: torch.dtype, tokens: int, q_rank: int, latent: int, half: int
) -> None:
    both = noise(tokens, q_rank + latent + 2 * half + 7, dtype=dtype).to(backend.device)
    views = both[:, 7 : 7 + q_rank], both[:, 7 + q_rank :]  # as a joined product leaves them
    q_a, kv_a = (view.cpu() for view in views)
    q_weight, kv_weight, (cos, sin) = noise(q_rank), noise(latent), angles(tokens, half)
    there = [*views, q_weight.to(backend.device), kv_weight.to(backend.device)]
    turns = [t.to(backend.device) for t in (cos, sin)]
    got = backend.op("mla_latents")(*there, 1e-6, *turns)
    assert_close(got[0], rms(q_a, q_weight, 1e-6), dtype)
    assert_close(got[1], rms(kv_a[:, :latent], kv_weight, 1e-6), dtype)
    rope = turned(kv_a[:, None, latent:], cos, sin, interleaved=True)
    assert_close(got[2], rope[:, 0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens, dim, half", [(0, 32, 8), (1, 32, 16), (5, 72, 18)])
def test_index_keys(
    backend: Any, dtype: torch.dtype, interleaved: bool, tokens: int, dim: int, half: int
) -> None:
    view = noise(tokens, dim + 5, dtype=dtype).to(backend.device)[:, 5:]
    keys, weight, bias = view.cpu(), noise(dim), noise(dim)
    cos, sin = angles(tokens, half)
    there = [view, weight.to(backend.device), bias.to(backend.device)]
    turns = [t.to(backend.device) for t in (cos, sin)]
    got = backend.op("index_key_rows")(*there, 1e-6, *turns, interleaved=interleaved)
    wide = keys.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = (normed * weight.double() + bias.double()).to(dtype)  # rounded before it is rotated
    rope = turned(normed[:, None, : 2 * half], cos, sin, interleaved=interleaved)[:, 0]
    expected = torch.cat((rope, normed[:, 2 * half :].double()), -1)
    # Two values near a rounding step apart may be rotated into one: an absolute step of theirs.
    step = 2.0**-6 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.double().cpu(), expected, rtol=step, atol=4 * step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens, heads, half", [(0, 4, 8), (1, 1, 16), (3, 17, 12)])
def test_rotation_of_views(
    backend: Any, dtype: torch.dtype, interleaved: bool, tokens: int, heads: int, half: int
) -> None:
    whole = noise(tokens, heads, 2 * half + 10, dtype=dtype).to(backend.device)
    target = torch.full((tokens, heads, 2 * half + 6), torch.nan, dtype=dtype).to(backend.device)
    cos, sin = angles(tokens, half)
    turns = [t.to(backend.device) for t in (cos, sin)]
    x = whole[..., 10:]
    expected = turned(x.cpu(), cos, sin, interleaved=interleaved)
    backend.op("rotate")(x, *turns, target[..., 6:], interleaved=interleaved)
    assert_close(target[..., 6:], expected, dtype)
    assert target[..., :6].isnan().all()
    before = whole[..., :10].clone()
    backend.op("rotate")(x, *turns, x, interleaved=interleaved)
    assert torch.equal(whole[..., 10:], target[..., 6:]), "in place as elsewhere"
    assert torch.equal(whole[..., :10], before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_copies_the_rest_of_a_head(
    backend: Any, dtype: torch.dtype, interleaved: bool
) -> None:
    tokens, heads, half, dim = 3, 17, 8, 45
    whole = noise(tokens, heads * dim + 9, dtype=dtype).to(backend.device)
    x = whole[:, 9:].unflatten(1, (heads, dim))
    out = torch.full((tokens, heads, dim), torch.nan, dtype=dtype, device=backend.device)
    cos, sin = angles(tokens, half)
    turns = [t.to(backend.device) for t in (cos, sin)]
    backend.op("rotate")(x, *turns, out, interleaved=interleaved)
    expected = turned(x[..., : 2 * half].cpu(), cos, sin, interleaved=interleaved)
    assert_close(out[..., : 2 * half], expected, dtype)
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])
    with pytest.raises(ValueError, match=r"x must be \[T, H, 16 or more\]"):
        backend.op("rotate")(x[..., :15], *turns, out[..., :15], interleaved=interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(0, 8), (1, 1), (3, 1025)])
def test_gating(backend: Any, dtype: torch.dtype, tokens: int, dim: int) -> None:
    both = noise(tokens, 2 * dim, dtype=dtype).to(backend.device)
    got = backend.op("silu_mul")(*both.chunk(2, -1))
    gate, up = both.cpu().chunk(2, -1)
    assert_close(got, gate.double() * gate.double().sigmoid() * up.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, dim", [(0, 8), (1, 1), (3, 1025)])
def test_sum_is_rounded_once(backend: Any, dtype: torch.dtype, tokens: int, dim: int) -> None:
    total, more = noise(tokens, dim), noise(tokens, dim, dtype=dtype)
    got = backend.op("add_rounded")(total.to(backend.device), more.to(backend.device))
    assert torch.equal(got.cpu(), (total + more.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, size, outputs",
    [(0, 8, 4), (1, 1, 1), (1, 1300, 3), (1, 8200, 2), (5, 1300, 3), (65, 40, 2)],
)
def test_wide_linear(
    backend: Any, dtype: torch.dtype, tokens: int, size: int, outputs: int
) -> None:
    x, weight = noise(tokens, size, dtype=dtype), noise(outputs, size)
    got = backend.op("wide_linear")(x.to(backend.device), weight.to(backend.device), 0.125)
    assert got.dtype == torch.float32
    expected = x.double() @ weight.double().T * 0.125
    plain = (x.float() @ weight.T * 0.125 - expected).abs().max() if tokens else 0.0
    torch.testing.assert_close(
        got.double().cpu(), expected, rtol=0, atol=2 * float(plain) + 1e-5 * size**0.5
    )


ROUTES = [(8, 4, 2, 2, True), (32, 8, 4, 8, True), (12, 1, 1, 3, False), (6, 3, 1, 2, True)]


@pytest.mark.parametrize("experts, groups, winners, chosen, normalise", ROUTES)
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_routing(
    backend: Any, experts: int, groups: int, winners: int, chosen: int, normalise: bool, tokens: int
) -> None:
    logits, bias = noise(tokens, experts), noise(experts)
    weights, numbers = backend.op("route")(
        logits.to(backend.device),
        bias.to(backend.device),
        groups=groups,
        chosen_groups=winners,
        chosen=chosen,
        normalise=normalise,
        factor=2.5,
    )
    assert weights.dtype == torch.float32 and numbers.dtype == torch.int64
    for token in range(tokens):
        score = logits[token].double().sigmoid()
        choice = score + bias.double()
        best_two = [
            sum(sorted(group.tolist())[-2:]) if groups > 1 else 0.0
            for group in choice.chunk(groups)
        ]
        kept = sorted(range(groups), key=lambda group: -best_two[group])[:winners]
        eligible = [n for n in range(experts) if n // (experts // groups) in kept]
        expected = sorted(eligible, key=lambda n: -float(choice[n]))[:chosen]
        assert numbers[token].tolist() == expected
        share = score[expected]
        if normalise:
            share = share / share.sum()
        torch.testing.assert_close(weights[token].double().cpu(), share * 2.5, rtol=1e-5, atol=1e-7)


def test_routing_ties_and_impossible_sizes(backend: Any) -> None:
    route = backend.op("route")
    sizes: dict[str, Any] = {"groups": 2, "chosen_groups": 1, "chosen": 2, "normalise": True}
    flat = torch.zeros(1, 8, device=backend.device)
    weights, numbers = route(flat, flat[0].clone(), **sizes, factor=1.0)
    assert len(set(numbers[0].tolist())) == 2
    assert {number // 4 for number in numbers[0].tolist()} in ({0}, {1})
    torch.testing.assert_close(weights.cpu(), torch.full((1, 2), 0.5))
    with pytest.raises(ValueError, match="5 experts can't come from 1 of 2 groups of 4"):
        route(flat, flat[0].clone(), **sizes | {"chosen": 5}, factor=1.0)


@pytest.mark.parametrize("k", [1, 63, 600])
def test_selected_rows_are_named_through_the_tables(backend: Any, k: int) -> None:
    tables = torch.tensor([[5, 0, 7], [2, -1, -1]], dtype=torch.int32)
    owners = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    lengths = [192, 3, 65, 0]
    positions = torch.full((4, k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        chosen = torch.randperm(length)[:k].sort().values
        positions[row, : chosen.numel()] = chosen
    scores = torch.randn(4, 192)
    arguments = [t.to(backend.device) for t in (positions, scores, owners, tables)]
    slots, values = backend.op("name_rows")(*arguments)
    for row in range(4):
        for entry in range(k):
            position = int(positions[row, entry])
            if position < 0:
                assert slots[row, entry] == -1 and values[row, entry] == -torch.inf
            else:
                block = int(tables[owners[row], position // 64])
                assert slots[row, entry] == block * 64 + position % 64
                assert values[row, entry].cpu() == scores[row, position]
