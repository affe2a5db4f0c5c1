"""DeepSeek-V3.2 and its relatives (GLM-5): decoder layers around MLA with a lightning indexer.

Inference only. Module and parameter names follow the checkpoints' (`models.weights` maps the few
that are stored differently). All state between passes lives in the `ForwardContext`.
"""

import torch
from torch import Tensor, nn

from echokv.attention.context import ForwardContext
from echokv.cache.batch import ForwardBatch
from echokv.config import ModelConfig
from echokv.indexer.indexer import Selection
from echokv.models.layers import Embedding, Linear, RMSNorm
from echokv.models.matrices import Matrices
from echokv.models.mla import MLA
from echokv.models.moe import MoE
from echokv.models.rope import Rope


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, matrices: Matrices) -> None:
        super().__init__()
        self.self_attn = MLA(config, layer, matrices.under("self_attn"))
        mlp = matrices.under("mlp")
        self.mlp: nn.Module
        if config.mlp_layer_types[layer] == "sparse":
            self.mlp = MoE(config, mlp)
        else:
            self.mlp = mlp.gated_mlp(config.hidden_size, config.intermediate_size)
        norm = (config.hidden_size, config.rms_norm_eps, matrices.ops)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)

    def forward(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        batch: ForwardBatch,
        context: ForwardContext,
        angles: tuple[Tensor, Tensor],
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor, Selection]:
        """One layer over the residual stream, whose last addition is left to the next norm.

        Args:
            hidden: [T, hidden], the residual stream but for delta.
            delta: [T, hidden], what the previous layer adds; None in the first.
            batch: the pass.
            context: indexer, attention and observer.
            angles: cosines and sines, each [T, rope_dim / 2].
            selection: the previous full layer's.

        Returns:
            hidden and delta as before, and the selection for a following shared layer.
        """
        hidden, normed = self.input_layernorm.of_sum(hidden, delta)
        attended, selection = self.self_attn(normed, batch, context, angles, selection)
        hidden, normed = self.post_attention_layernorm.of_sum(hidden, attended)
        return hidden, self.mlp(normed), selection


class DeepseekV32(nn.Module):
    """The whole model, its weights uninitialised until `models.weights.load_weights` fills them.

    Args:
        config: shapes and switches.
        matrices: how they are kept; dtype is float32 or bfloat16. Norms, the router and the index
            heads' weights are float32 in either case.
        device: where weights live; "meta" allocates nothing.
    """

    def __init__(self, config: ModelConfig, matrices: Matrices, device: torch.device) -> None:
        super().__init__()
        dtype = matrices.dtype
        self.config = config
        self.dtype = dtype
        self._token_tile = matrices.token_tile
        self._rope = Rope(config.rope, config.qk_rope_head_dim, device)
        with device:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
            self.layers = nn.ModuleList(
                DecoderLayer(config, layer, matrices.under(f"layers.{layer}"))
                for layer in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, matrices.ops)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, batch: ForwardBatch, context: ForwardContext) -> Tensor:
        """Run one pass and store its rows and index keys.

        Args:
            batch: the pass; exactly `token_tile` rows where there is a tile.
            context: indexer and attention over the memory of earlier passes.

        Returns:
            [T, hidden], final norm applied; rows of padding are meaningless.
        """
        assert self._token_tile in (None, batch.num_tokens), "the runner pads passes to the tile"
        context.attention.begin_pass(batch)
        context.indexer.begin_pass(batch)
        angles = self._rope.angles(batch.positions)
        hidden: Tensor = self.embed_tokens(batch.token_ids)
        delta: Tensor | None = None
        selection: Selection | None = None
        for layer in self.layers:
            hidden, delta, selection = layer(hidden, delta, batch, context, angles, selection)
        context.attention.end_pass()
        return self.norm.of_sum(hidden, delta)[1]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of some rows of `forward`'s result, which the caller pads to a fixed shape.

        Args:
            hidden: [S, hidden].

        Returns:
            [S, vocab] float32.
        """
        logits: Tensor = self.lm_head(hidden)
        return logits.float()
