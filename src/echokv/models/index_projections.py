"""The indexer's queries, keys and head weights, as a layer makes them (DeepSeek-V3.2, section 2.1).

Follows DeepSeek's reference code as fixed in November 2025: half-split rope for V3.2 and head
weights in float32. GLM rotates interleaved (`RopeConfig.indexer_interleaved`).
"""

import torch
from torch import Tensor, nn

from echokv.config import ModelConfig
from echokv.kernels.protocol import ModelKernels
from echokv.models.layers import LayerNorm, weight
from echokv.models.matrices import Matrices

KEY_NORM_EPS = 1e-6


class HeadWeights(nn.Module):
    """How much each index head counts for a token; float32 throughout."""

    def __init__(self, hidden_size: int, num_heads: int, ops: ModelKernels) -> None:
        super().__init__()
        self._ops = ops
        self.weight = weight(num_heads, hidden_size, dtype=torch.float32)
        self._scale: float = num_heads**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, H] float32, times H ** -0.5."""
        return self._ops.wide_linear(x, self.weight, self._scale)


class IndexProjections(nn.Module):
    """The indexer's part in one layer; the layer joins wk with matrices of its own.

    Args:
        config: shapes.
        matrices: how they are kept.
    """

    def __init__(self, config: ModelConfig, matrices: Matrices) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = matrices.linear("wq_b", config.q_lora_rank, heads * dim)
        self.k_norm = LayerNorm(dim)
        self.weights_proj = HeadWeights(config.hidden_size, heads, matrices.ops)
        self._shape = (heads, dim)
        self._interleaved = config.rope.indexer_interleaved
        self._ops = matrices.ops

    def query(
        self, x: Tensor, q_latent: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Project and rotate the query; the first rope dimensions of a head carry the position.

        Args:
            x: [T, hidden], the layer's normed input.
            q_latent: [T, q_lora_rank], normed.
            angles: cosines and sines, each [T, rope_dim / 2].

        Returns:
            query [T, H, D], weights [T, H] float32.
        """
        query = self.wq_b(q_latent).unflatten(-1, self._shape)
        self._ops.rotate(query, *angles, query, interleaved=self._interleaved)
        return query, self.weights_proj(x)

    def keys(self, projected: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Norm and rotate the keys.

        Args:
            projected: [T, D], wk of the layer's normed input.
            angles: cosines and sines, each [T, rope_dim / 2].

        Returns:
            [T, D].
        """
        return self._ops.index_key_rows(
            projected,
            self.k_norm.weight,
            self.k_norm.bias,
            KEY_NORM_EPS,
            *angles,
            interleaved=self._interleaved,
        )
