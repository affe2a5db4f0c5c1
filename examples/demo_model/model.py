"""A DeepSeek-V3.2 decoder that trains: MLA, mixture of experts, lightning indexer.

Dense or sparse attention over whole sequences, no cache. Token-wise parts work on [N, ...] with
N = B * T constant over all phases, so that they compile once; attention sees [B, T, ...]. The
weights are float32 and multiply in bfloat16 under autocast. Names follow HF's, experts stacked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.demo_model.indexing import IndexerLoss, SparseMask
from examples.demo_model.layers import (
    EPS,
    Angles,
    Linear,
    RMSNorm,
    matrix,
    rotate_half,
    rotate_interleaved,
)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes in the names of HF's config."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    intermediate_size: int = 768
    moe_intermediate_size: int = 96
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 1.5
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 256
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 20_480

    @property
    def qk_head_dim(self) -> int:
        """Of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class IndexProjections(nn.Module):
    """The indexer's query heads, one key and head weights for each token."""

    def __init__(self, s: Shapes) -> None:
        super().__init__()
        self.wq_b = Linear(s.q_lora_rank, s.index_n_heads * s.index_head_dim)
        self.wk = Linear(s.hidden_size, s.index_head_dim)
        self.k_norm = nn.LayerNorm(s.index_head_dim, eps=EPS)
        self.weights_proj = Linear(s.hidden_size, s.index_n_heads)
        self._heads, self._rope = s.index_n_heads, s.qk_rope_head_dim

    def forward(self, x: Tensor, q_latent: Tensor, angles: Angles) -> tuple[Tensor, ...]:
        """Query [N, H, D], keys [N, D], weights [N, H] float32 with both scales in."""
        query = self.wq_b(q_latent).unflatten(-1, (self._heads, -1))
        keys = self.k_norm(self.wk(x).float()).to(query.dtype)
        query, keys = (
            torch.cat((rotate_half(t[..., : self._rope], angles), t[..., self._rope :]), -1)
            for t in (query, keys)
        )
        weights = self.weights_proj(x).float() * (self._heads * query.shape[-1]) ** -0.5
        return query, keys, weights


class Attention(nn.Module):
    """MLA in its expanded form."""

    def __init__(self, s: Shapes) -> None:
        super().__init__()
        self.s = s
        heads = s.num_attention_heads
        self.q_a_proj = Linear(s.hidden_size, s.q_lora_rank)
        self.q_a_layernorm = RMSNorm(s.q_lora_rank)
        self.q_b_proj = Linear(s.q_lora_rank, heads * s.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank)
        self.kv_b_proj = Linear(s.kv_lora_rank, heads * (s.qk_nope_head_dim + s.v_head_dim))
        self.o_proj = Linear(
            heads * s.v_head_dim, s.hidden_size, gain=0.5 * s.num_hidden_layers**-0.5
        )
        self.indexer = IndexProjections(s)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, ...]:
        """Normed input [N, hidden] to q_latent, query, key [N, H, D] and value [N, H, V]."""
        s, heads = self.s, self.s.num_attention_heads
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        query = self.q_b_proj(q_latent).unflatten(-1, (heads, -1))
        q_nope, q_rope = query.split((s.qk_nope_head_dim, s.qk_rope_head_dim), -1)
        query = torch.cat((q_nope, rotate_interleaved(q_rope, angles)), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
        k_rope = rotate_interleaved(k_rope, angles)[:, None].expand(-1, heads, -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1))
        k_nope, value = expanded.split((s.qk_nope_head_dim, s.v_head_dim), -1)
        return q_latent, query, torch.cat((k_nope, k_rope), -1), value.contiguous()


class DenseMLP(nn.Module):
    """down(silu(gate) * up)."""

    def __init__(self, hidden: int, inner: int, layers: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden, gain=0.5 * layers**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Sigmoid router balanced by a bias (noaux_tc), one group; all experts run, losers by 0.

    The experts are so small that one wide product over all of them beats sorting tokens.
    """

    def __init__(self, s: Shapes) -> None:
        super().__init__()
        self.s = s
        experts, inner, hidden = s.n_routed_experts, s.moe_intermediate_size, s.hidden_size
        self.gate = nn.Module()
        self.gate.weight = matrix(experts, hidden)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.experts = nn.Module()
        self.experts.gate_proj = matrix(experts, inner, hidden)
        self.experts.up_proj = matrix(experts, inner, hidden)
        gain = 0.5 * s.num_hidden_layers**-0.5
        self.experts.down_proj = matrix(experts, hidden, inner, gain=gain)
        self.shared_experts = DenseMLP(hidden, s.n_shared_experts * inner, s.num_hidden_layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, hidden] -> [N, hidden], and each expert's share of the choices [E] float32."""
        routing = self._route(x)  # [N, E], zero for experts not chosen
        gate = functional.linear(x, self.experts.gate_proj.flatten(0, 1))
        up = functional.linear(x, self.experts.up_proj.flatten(0, 1))
        inner = (functional.silu(gate) * up).unflatten(-1, (routing.shape[1], -1))
        inner = (inner * routing[:, :, None].to(inner.dtype)).flatten(1)
        down = self.experts.down_proj.permute(1, 0, 2).flatten(1)  # [hidden, E * inner]
        load = (routing.detach() > 0).float().mean(0)
        return functional.linear(inner, down) + self.shared_experts(x), load

    def _route(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.float(), self.gate.weight).sigmoid()
        chosen = (
            (scores.detach() + self.gate.e_score_correction_bias)
            .topk(self.s.num_experts_per_tok, dim=-1)
            .indices
        )
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        kept = scores * mask
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.s.routed_scaling_factor


class Layer(nn.Module):
    """One decoder layer, in a part before and a part after attention."""

    def __init__(self, s: Shapes, number: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size)
        self.mlp = (
            MoE(s) if number else DenseMLP(s.hidden_size, s.intermediate_size, s.num_hidden_layers)
        )

    def before(self, hidden: Tensor, angles: Angles) -> tuple[Tensor, ...]:
        """x, q_latent, query, key, value."""
        x = self.input_layernorm(hidden)
        return x, *self.self_attn.project(x, angles)

    def after(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add attention [N, H * V] and the MLP; the experts' load too."""
        hidden = hidden + self.self_attn.o_proj(attended)
        out = self.mlp(self.post_attention_layernorm(hidden))
        out, load = out if isinstance(out, tuple) else (out, None)
        return hidden + out, load

    def index(self, x: Tensor, q_latent: Tensor, angles: Angles) -> tuple[Tensor, ...]:
        """The indexer's projections of detached inputs."""
        return self.self_attn.indexer(x.detach(), q_latent.detach(), angles)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of fixed shapes."""
    return torch.compile(function, dynamic=False)


@dataclass
class Extras:
    """What a forward pass reports besides its loss: experts' loads, indexer losses by layer."""

    loads: list[Tensor]
    index_losses: list[Tensor]


class DemoModel(nn.Module):
    """The whole model.

    Args:
        shapes: sizes.
        tokens_compiled: passes of exactly so many tokens run compiled; 0: none.
    """

    def __init__(self, shapes: Shapes, *, tokens_compiled: int = 0) -> None:
        super().__init__()
        self.s = shapes
        self.embed_tokens = nn.Embedding(shapes.vocab_size, shapes.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(shapes, i) for i in range(shapes.num_hidden_layers))
        self.norm = RMSNorm(shapes.hidden_size)
        self.lm_head = Linear(shapes.hidden_size, shapes.vocab_size, gain=0.2)
        self._eager = [(x.before, x.after, x.index) for x in self.layers]
        self._compiled = [tuple(map(compiled, parts)) for parts in self._eager]
        self._compiled_losses = compiled(self._losses_of_hidden)
        self._tokens_compiled = tokens_compiled

    def angles(self, batch: int, length: int) -> Angles:
        """Cosines and sines of B sequences' positions, [B * T, rope / 2] float32."""
        device, dim = self.norm.weight.device, self.s.qk_rope_head_dim
        pairs = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        turns = torch.arange(length, device=device).float()[:, None] / self.s.rope_theta**pairs
        return turns.cos().repeat(batch, 1), turns.sin().repeat(batch, 1)

    def forward(
        self,
        tokens: Tensor,
        *,
        sparse: bool = False,
        index_loss: IndexerLoss | None = None,
        index_only: bool = False,
    ) -> tuple[Tensor, Extras]:
        """Final hidden states.

        Args:
            tokens: [B, T] int64.
            sparse: attend to the indexer's top-k only.
            index_loss: train the indexers on its sampled queries.
            index_only: back-propagate each layer's indexer loss at once; the rest gets no
                gradient (call under no_grad; gradients are enabled where needed).

        Returns:
            [N, hidden] and extras.
        """
        batch, length = tokens.shape
        angles = self.angles(batch, length)
        hidden = self.embed_tokens(tokens.flatten())
        if torch.is_autocast_enabled(tokens.device.type):
            hidden = hidden.bfloat16()
        extras = Extras([], [])
        in_graph = len(hidden) == self._tokens_compiled
        for before, after, index in self._compiled if in_graph else self._eager:
            x, q_latent, *qkv = before(hidden, angles)
            query, key, value = (
                t.view(batch, length, *t.shape[1:]).transpose(1, 2) for t in qkv
            )  # [B, H, T, D]
            mask: SparseMask | None = None
            if sparse or index_loss is not None:
                with torch.set_grad_enabled(index_loss is not None):
                    projections = [
                        t.view(batch, length, *t.shape[1:]) for t in index(x, q_latent, angles)
                    ]
                if sparse:
                    mask = SparseMask(*projections, self.s.index_topk)
                if index_loss is not None:
                    with torch.enable_grad():
                        loss = index_loss(*projections, query, key, mask)
                        if index_only:
                            loss.backward()
                    extras.index_losses.append(loss if not index_only else loss.detach())
            attended = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if mask is None else mask.bias,
                is_causal=mask is None,
            )
            hidden, load = after(hidden, attended.transpose(1, 2).reshape(batch * length, -1))
            if load is not None:
                extras.loads.append(load.detach())
        return hidden, extras

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of each token, [N] float32."""
        in_graph = len(hidden) == self._tokens_compiled
        function = self._compiled_losses if in_graph else self._losses_of_hidden
        return function(hidden, targets)

    def _losses_of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(hidden)).float()
        return functional.cross_entropy(logits, targets, reduction="none")

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab] float32."""
        return self.lm_head(self.norm(hidden)).float()

    @torch.no_grad()
    def balance(self, loads: list[Tensor], speed: float) -> None:
        """Move each router's bias towards equal loads (noaux_tc)."""
        routers = [layer.mlp.gate for layer in self.layers if isinstance(layer.mlp, MoE)]
        for router, load in zip(routers, loads, strict=True):
            router.e_score_correction_bias += speed * (load.mean() - load).sign()

    def index_parameters(self) -> list[nn.Parameter]:
        """The indexers' own."""
        return [p for layer in self.layers for p in layer.self_attn.indexer.parameters()]
