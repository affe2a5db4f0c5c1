"""What a model's tokens, its weights and its activations take: the figures of the byte plan."""

from dataclasses import dataclass

from echokv.config import EngineConfig, ModelConfig
from echokv.memory.formats import IndexKeyFormat, RowFormat

FIXED_WORKSPACE_BYTES = 2**30
"""HBM kept for libraries, CUDA graphs, the drawing of tokens and fragmentation."""

MAX_SCORE_BYTES = 256 * 2**20
"""Most bytes of index scores alive at once: what `indexer.Indexer` allows itself."""

SCORE_WORKSPACE_BYTES = 2 * MAX_SCORE_BYTES
"""HBM kept for them, with as much again as a margin."""

PREFETCH_BYTES_PER_TOKEN = 9.84
"""Rows that a request may prefetch in a layer and decode step, in bytes for each token of context:
0.015 rows of 656 B, six times what PCIe moves while the indexer reads the token's key (52 GB/s
against 132 B at 4.2 TB/s). The top-k's time comes on top, and other requests may need less; what is
asked for too much stops when the selection is known."""

LEAST_PREFETCH_ROWS = 16
"""The same of a request whose context is short."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes a token, and bytes whatever their number."""

    row_bytes: int  # a token in all layers
    key_bytes: int  # a token in all index layers
    host_metadata_bytes: int  # a host slot in all layers
    device_metadata_bytes: int  # a device slot in all layers
    weight_bytes: int
    workspace_bytes: int
    topk: int

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        row_format: RowFormat,
        index_key_format: IndexKeyFormat,
        *,
        weight_bytes: int,
        on_device: bool,
    ) -> "Sizes":
        """From the model and the formats.

        Args:
            model: layers, top-k and sizes.
            config: whether there is offload, and most tokens and requests of a step.
            row_format: bytes of a row.
            index_key_format: bytes of an index key.
            weight_bytes: bytes of the loaded weights.
            on_device: False on a CPU, where no workspace is kept.
        """
        layers = model.num_hidden_layers
        host_metadata, device_metadata = metadata_bytes(layers, offload=config.offload)
        return cls(
            row_bytes=layers * row_format.row_bytes,
            key_bytes=len(model.index_layers) * index_key_format.key_bytes,
            host_metadata_bytes=host_metadata,
            device_metadata_bytes=device_metadata,
            weight_bytes=weight_bytes,
            workspace_bytes=_workspace_bytes(model, config, row_format) if on_device else 0,
            topk=model.index_topk,
        )

    @property
    def fixed_bytes(self) -> int:
        """Whatever the number of tokens."""
        return self.weight_bytes + self.workspace_bytes

    @property
    def host_slot_bytes(self) -> int:
        """Device bytes that every host slot takes."""
        return self.key_bytes + self.host_metadata_bytes

    @property
    def device_slot_bytes(self) -> int:
        """Device bytes that every device slot takes, all layers together."""
        return self.row_bytes + self.device_metadata_bytes


def metadata_bytes(layers: int, *, offload: bool) -> tuple[int, int]:
    """Bytes of mappings and priorities of a host slot and of a device slot, in all layers."""
    # Without offload one int32 and one flag a slot suffice for all layers: see cache.resident.
    return (4 * layers, 13 * layers) if offload else (0, 5)


def _workspace_bytes(model: ModelConfig, config: EngineConfig, row_format: RowFormat) -> int:
    """HBM kept for activations: generous, as what isn't kept is given to the device pool."""
    latent = model.kv_lora_rank + model.qk_rope_head_dim
    head = 2 * latent + model.qk_nope_head_dim + model.v_head_dim
    selection = 6 * model.index_topk  # positions, both slots, scores, priorities, missing rows
    token = 4 * (model.num_attention_heads * head + 8 * model.hidden_size + selection)
    logits = 4 * config.max_num_seqs * model.vocab_size
    return (
        FIXED_WORKSPACE_BYTES
        + SCORE_WORKSPACE_BYTES
        + config.max_num_batched_tokens * token
        + 2 * logits
        + _prefetch_bytes(model, config, row_format)
    )


def _prefetch_bytes(model: ModelConfig, config: EngineConfig, row_format: RowFormat) -> int:
    """What a decode step's prefetches note of their rows: a host slot and a score, in all layers.

    Twice, in the memory of CUDA graphs and out of it.
    """
    if config.prefetch == "off":
        return 0
    longest = config.max_model_len or model.max_position_embeddings
    rows = LEAST_PREFETCH_ROWS + int(longest * PREFETCH_BYTES_PER_TOKEN / row_format.row_bytes)
    return 2 * 8 * len(model.index_layers) * config.max_num_seqs * rows
