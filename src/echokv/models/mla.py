"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Queries are brought into the latent space (through the key half of kv_b_proj), so that attention
reads the cached rows as they are; its output leaves the latent space through the value half.
"""

import torch
from torch import Tensor

from echokv.attention.context import ForwardContext
from echokv.cache.batch import ForwardBatch
from echokv.config import ModelConfig
from echokv.indexer.indexer import Selection
from echokv.models.index_projections import IndexProjections
from echokv.models.joined import Joined
from echokv.models.layers import RMSNorm, Stacked, weight
from echokv.models.matrices import Matrices

LATENT_NORM_EPS = 1e-6
"""Epsilon of the two latent norms: DeepSeek's and HF's default, whatever rms_norm_eps says."""


class LatentExpansion(Stacked):
    """kv_b_proj, kept per head and used in both directions; never in fp8, whatever is stored.

    `weight` is [H, nope + v, latent]: the key half absorbs queries, the value half expands
    attention outputs.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self._nope = config.qk_nope_head_dim
        self.weight = weight(
            config.num_attention_heads,
            self._nope + config.v_head_dim,
            config.kv_lora_rank,
            dtype=dtype,
        )

    def places(self) -> dict[str, Tensor]:
        """See `Stacked`."""
        return {"weight": self.weight.flatten(0, 1)}

    def absorb(self, q_nope: Tensor, out: Tensor) -> None:
        """[T, H, nope] -> out [T, H, latent], any view of contiguous rows."""
        _by_head(q_nope, self.weight[:, : self._nope], out)

    def expand_values(self, latent: Tensor) -> Tensor:
        """[T, H, latent] -> [T, H, v]."""
        values = self.weight[:, self._nope :].transpose(1, 2)  # [H, latent, v]
        out = latent.new_empty(*latent.shape[:2], values.shape[2])
        _by_head(latent, values, out)
        return out


def _by_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[t, h] = x[t, h] @ weight[h]."""
    if x.is_cuda:  # cuBLAS writes to any leading dimension, so nothing is copied
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    else:
        out.copy_(torch.bmm(x.transpose(0, 1), weight).transpose(0, 1))


QUERY_BESIDE_TOKENS = 4
"""Up to so many, a decode step makes its attention queries beside its indexer: the kernels of few
tokens leave SMs idle. More tokens have rows to recall beside these products."""


class MLA(Stacked):
    """One layer's attention, its indexer included where it has one.

    Args:
        config: shapes.
        layer: which decoder layer.
        matrices: how they are kept.
    """

    def __init__(self, config: ModelConfig, layer: int, matrices: Matrices) -> None:
        super().__init__()
        hidden, q_rank = config.hidden_size, config.q_lora_rank
        self._layer = layer
        self._ops = matrices.ops
        self._heads = config.num_attention_heads
        self._q_dims = (config.qk_nope_head_dim, config.qk_rope_head_dim)
        self._kv_dims = (config.kv_lora_rank, config.qk_rope_head_dim)
        from_hidden = {"q_a_proj": q_rank, "kv_a_proj_with_mqa": sum(self._kv_dims)}
        if layer in config.index_layers:
            # Whole blocks of fp8 first: the one odd size comes last, and nothing is padded.
            from_hidden = {"q_a_proj": q_rank, "indexer.wk": config.index_head_dim} | from_hidden
        self.from_hidden = Joined(from_hidden, hidden, matrices)
        self.q_b_proj = matrices.linear("q_b_proj", q_rank, self._heads * sum(self._q_dims))
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = LatentExpansion(config, matrices.dtype)
        self.o_proj = matrices.linear("o_proj", self._heads * config.v_head_dim, hidden)
        self.indexer = None
        if layer in config.index_layers:
            self.indexer = IndexProjections(config, matrices.under("indexer"))
            self._index_layer = config.index_layers.index(layer)

    def places(self) -> dict[str, Tensor]:
        """See `Stacked`; the matrices that are joined, under their own names."""
        return self.from_hidden.parts()

    def forward(
        self,
        x: Tensor,
        batch: ForwardBatch,
        context: ForwardContext,
        angles: tuple[Tensor, Tensor],
        selection: Selection | None,
    ) -> tuple[Tensor, Selection]:
        """Store this pass's rows and index keys, select, attend.

        A row is the normed latent, then the rotated rope part in the projection's own interleaved
        order (pairs adjacent), which is how DeepSeek's cache and FlashMLA's callers store it.

        Args:
            x: [T, hidden], normed.
            batch: the pass.
            context: indexer, attention and observer.
            angles: cosines and sines, each [T, rope_dim / 2].
            selection: the previous full layer's; used by layers without an indexer.

        Returns:
            [T, hidden], and the selection that was attended.
        """
        from_hidden = self.from_hidden(x)  # q_a, the index key if any, kv_a
        q_latent, latent, k_rope = self._latents(from_hidden[0], from_hidden[-1], angles)
        few = batch.is_decode and batch.num_tokens <= QUERY_BESIDE_TOKENS
        beside = context.beside if self.indexer is not None and few else None
        if beside is not None:
            with beside.fork(q_latent, *angles):
                query = self._absorbed_query(q_latent, angles)
        context.attention.append(self._layer, latent, k_rope, batch)
        if self.indexer is not None:
            index_query, weights = self.indexer.query(x, q_latent, angles)
            keys = self.indexer.keys(from_hidden[1], angles)
            context.indexer.append(self._index_layer, keys, batch)
            selection = context.indexer.select(self._index_layer, index_query, weights, batch)
            if context.observer is not None:
                context.observer(self._layer, batch, selection)
        assert selection is not None, "ModelConfig guarantees that the first layer is full"
        if beside is None:
            context.attention.begin_recall(self._layer, selection, batch)
            query = self._absorbed_query(q_latent, angles)
        else:
            beside.join()
        attended = context.attention.attend(self._layer, query, selection, batch)
        values = self.kv_b_proj.expand_values(attended)  # [T, H, v]
        out: Tensor = self.o_proj(values.flatten(1))
        return out, selection

    def index_query(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The query and head weights that this layer's indexer makes of x, as in `forward`.

        Args:
            x: [T, hidden], normed.
            angles: cosines and sines, each [T, rope_dim / 2].
        """
        assert self.indexer is not None, "this layer shares another's selection"
        q_a, _, kv_a = self.from_hidden(x)
        q_latent, _, _ = self._latents(q_a, kv_a, angles)
        return self.indexer.query(x, q_latent, angles)

    def _latents(
        self, q_a: Tensor, kv_a: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._ops.mla_latents(
            q_a,
            kv_a,
            self.q_a_layernorm.weight,
            self.kv_a_layernorm.weight,
            LATENT_NORM_EPS,
            *angles,
        )

    def _absorbed_query(self, q_latent: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[T, q_lora_rank] -> [T, H, latent + rope]."""
        heads: Tensor = self.q_b_proj(q_latent).unflatten(-1, (self._heads, -1))
        nope, rope = heads.split(self._q_dims, -1)
        query: Tensor = heads.new_empty(*heads.shape[:2], sum(self._kv_dims))
        latent_part, rope_part = query.split(self._kv_dims, -1)
        self.kv_b_proj.absorb(nope, latent_part)
        self._ops.rotate(rope, *angles, rope_part, interleaved=True)
        return query
