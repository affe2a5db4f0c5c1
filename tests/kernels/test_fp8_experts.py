"""A mixture of fp8 experts, against each token through its experts by itself, in fp64."""

from typing import Any

import pytest
import torch
from tests.kernels.test_fp8_linear import (
    activations,
    assert_close,
    exact_activations,
    exact_weight,
    fp8_weight,
)
from torch import Tensor
from torch.nn import functional

EXPERTS, HIDDEN, INNER, CHOICES = 6, 256, 128, 2


class Case:
    """Tokens that choose among experts 1 to 4: nobody chooses the first and the last."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.x = activations(device, tokens, HIDDEN)
        self.experts = (1 + torch.rand(tokens, 4).argsort(1)[:, :CHOICES]).to(device)
        self.weights = torch.rand(tokens, CHOICES).to(device)
        self.gate_up = fp8_weight(device, EXPERTS, 2 * INNER, HIDDEN)
        self.down = fp8_weight(device, EXPERTS, HIDDEN, INNER)

    def run(self, backend: Any) -> Tensor:
        """The op."""
        out: Tensor = backend.op("fp8_experts")(
            self.x, self.experts, self.weights, *self.gate_up, *self.down
        )
        return out

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Straightforward PyTorch in a dtype, from the values that fp8 holds."""
        total = torch.zeros(self.x.shape, dtype=torch.float64)
        values = exact_activations(self.x).to(dtype)
        for token, choice in torch.cartesian_prod(*map(torch.arange, self.experts.shape)).tolist():
            expert = int(self.experts[token, choice])
            gate_up = exact_weight(self.gate_up[0][expert], self.gate_up[1][expert]).to(dtype)
            down = exact_weight(self.down[0][expert], self.down[1][expert]).to(dtype)
            gate, up = functional.linear(values[token], gate_up).chunk(2, -1)
            inner = (functional.silu(gate) * up).bfloat16()  # the op's contract
            result = functional.linear(exact_activations(inner).to(dtype), down)
            total[token] += self.weights[token, choice].double().cpu() * result.double()
        return total


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_experts(backend: Any, tokens: int) -> None:
    if backend.interpreted and tokens == 300:
        pytest.skip("slow under the interpreter")
    case = Case(backend.device, tokens)
    out = case.run(backend)
    assert out.shape == (tokens, HIDDEN) and out.dtype == torch.float32
    assert_close(out, case.dense(torch.float64), case.dense(torch.bfloat16))


def test_no_tokens(backend: Any) -> None:
    assert Case(backend.device, 0).run(backend).shape == (0, HIDDEN)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("tokens", [1, 3, 200, 700])
def test_blocks_hold_every_pair_of_one_expert_each(backend: Any, tokens: int, rows: int) -> None:
    if backend.name != "triton":
        pytest.skip("a step of the Triton kernels only")
    from echokv.kernels.triton.fp8_experts import group_by_expert

    case = Case(backend.device, tokens)
    groups = group_by_expert(case.experts, EXPERTS, rows)
    chosen, pairs = case.experts.flatten().tolist(), groups.pairs.tolist()
    seen = []
    for block, expert in enumerate(groups.experts.tolist()):
        if expert < 0:
            continue
        mine = [pair for pair in pairs[block * rows : (block + 1) * rows] if pair < len(chosen)]
        assert mine and all(chosen[pair] == expert for pair in mine)
        seen += mine
    assert sorted(seen) == list(range(len(chosen)))
    assert [pairs[place] for place in groups.places.tolist()] == list(range(len(chosen)))


def test_experts_refuse_what_does_not_fit(backend: Any) -> None:
    case = Case(backend.device, 2)
    case.experts = case.experts.int()
    with pytest.raises(ValueError, match=r"experts must be torch.int64, got torch.int32"):
        case.run(backend)
