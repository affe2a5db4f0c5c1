"""Mixture of experts: DeepSeek's sigmoid router with group-limited choice, and the experts.

On the reference backend a token's result has the same bits whatever else is in the pass: each
expert multiplies tiles of `token_tile` rows, and a token's expert outputs are added in the order
of its own choices, not in that of arrival.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from echokv.config import ModelConfig
from echokv.kernels.protocol import ModelKernels
from echokv.models.fp8 import Fp8Experts
from echokv.models.layers import PLAIN, Stacked, weight
from echokv.models.matrices import Matrices


class Router(nn.Module):
    """Chooses experts ("noaux_tc" of DeepSeek-V3, arXiv 2412.19437 section 2.1.2).

    Scores are sigmoids in float32. The correction bias takes part in the choice, not in the
    weights. Groups compete by the sum of their two best experts; only the best groups' experts
    can be chosen.
    """

    def __init__(self, config: ModelConfig, ops: ModelKernels = PLAIN) -> None:
        super().__init__()
        experts = config.n_routed_experts
        self._ops = ops
        self.weight = weight(experts, config.hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = weight(experts, dtype=torch.float32)
        self._config = config

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose for each token.

        Args:
            x: [T, hidden].

        Returns:
            weights [T, k] float32 and experts [T, k] int64, best choice first.
        """
        config = self._config
        return self._ops.route(
            self._ops.wide_linear(x, self.weight, 1.0),
            self.e_score_correction_bias,
            groups=config.n_group,
            chosen_groups=config.topk_group,
            chosen=config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
        )


class Experts(Stacked):
    """Every routed expert's gated MLP, stacked.

    Args:
        config: shapes.
        dtype: of weights and activations.
        token_tile: rows of each expert's products (padded), or None for as many as there are.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, token_tile: int | None) -> None:
        super().__init__()
        experts, inner = config.n_routed_experts, config.moe_intermediate_size
        self.gate_up_proj = weight(experts, 2 * inner, config.hidden_size, dtype=dtype)
        self.down_proj = weight(experts, config.hidden_size, inner, dtype=dtype)
        self._token_tile = token_tile

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Each token through each expert that it chose, weighted and summed in float32.

        Args:
            x: [T, hidden].
            experts: [T, k] int64, distinct in a row.
            weights: [T, k] float32.

        Returns:
            [T, hidden] float32.
        """
        outputs = self.each(x, experts)
        total: Tensor = (outputs.float() * weights[:, :, None]).sum(1)
        return total

    def each(self, x: Tensor, experts: Tensor) -> Tensor:
        """Each token through each expert that it chose.

        Without a token tile, bfloat16 on CUDA is grouped and never waits for the device;
        everything else loops over the experts and reads their token counts back.

        Args:
            x: [T, hidden].
            experts: [T, k] int64, distinct in a row.

        Returns:
            [T, k, hidden], entry [t, i] by expert experts[t, i]; not weighted.
        """
        if self._token_tile is None and x.is_cuda and x.dtype == torch.bfloat16:
            return self.grouped(x, experts)
        return self.looped(x, experts)

    def looped(self, x: Tensor, experts: Tensor) -> Tensor:
        """`each`, one expert after the other, in tiles of fixed shape."""
        out = x.new_empty(*experts.shape, x.shape[1])
        for expert in experts.unique().tolist():
            tokens, choices = (experts == expert).nonzero(as_tuple=True)
            tile = self._token_tile or tokens.numel()
            for token, choice in zip(tokens.split(tile), choices.split(tile), strict=True):
                rows = x.new_zeros(tile, x.shape[1])
                rows[: token.numel()] = x[token]
                gate, up = functional.linear(rows, self.gate_up_proj[expert]).chunk(2, -1)
                result = functional.linear(functional.silu(gate) * up, self.down_proj[expert])
                out[token, choice] = result[: token.numel()]
        return out

    def grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """`each` with one grouped product over tokens sorted by expert."""
        chosen, order = experts.flatten().sort(stable=True)  # [T * k]
        numbers = torch.arange(self.down_proj.shape[0], device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # [E]
        rows = x[order // experts.shape[1]]
        gate_up = functional.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, -1)
        result = functional.grouped_mm(
            functional.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends
        )
        out = torch.empty_like(result)
        out[order] = result
        return out.view(*experts.shape, -1)

    def places(self) -> dict[str, Tensor]:
        """See `Stacked`."""
        places: dict[str, Tensor] = {}
        for number, (gate_up, down) in enumerate(
            zip(self.gate_up_proj, self.down_proj, strict=True)
        ):
            gate, up = gate_up.chunk(2)
            places[f"{number}.gate_proj.weight"] = gate
            places[f"{number}.up_proj.weight"] = up
            places[f"{number}.down_proj.weight"] = down
        return places


def _experts(config: ModelConfig, matrices: Matrices) -> nn.Module:
    """In fp8 if the first expert is; the loader refuses a checkpoint whose experts differ."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    names = ("0.gate_proj", "0.up_proj", "0.down_proj")
    if matrices.stay_fp8(*names, sizes=(hidden, inner)):
        return Fp8Experts(config.n_routed_experts, hidden, inner, matrices.kernels)
    return Experts(config, matrices.dtype, matrices.token_tile)


class MoE(nn.Module):
    """Routed experts, weighted, plus the shared experts; summed in float32."""

    def __init__(self, config: ModelConfig, matrices: Matrices) -> None:
        super().__init__()
        self.gate = Router(config, matrices.ops)
        self._ops = matrices.ops
        self.experts = _experts(config, matrices.under("experts"))
        self.shared_experts = None
        if config.n_shared_experts:
            inner = config.moe_intermediate_size * config.n_shared_experts
            shared = matrices.under("shared_experts")
            self.shared_experts = shared.gated_mlp(config.hidden_size, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        weights, experts = self.gate(x)
        total: Tensor = self.experts(x, experts, weights)
        if self.shared_experts is not None:
            return self._ops.add_rounded(total, self.shared_experts(x))
        return total.to(x.dtype)
