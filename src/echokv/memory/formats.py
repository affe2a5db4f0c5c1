"""How one token is stored: the row formats of the MLA latent KV and the formats of index keys.

Knows sizes only. Encoding and decoding are kernels (`kernels/*/rows.py`, `index_keys.py`).
"""

from dataclasses import dataclass

from echokv.errors import ConfigError
from echokv.memory.slots import BLOCK_TOKENS

ROW_FORMATS = ("float32", "bfloat16", "fp8_ds_mla")
INDEX_KEY_FORMATS = ("float32", "bfloat16", "fp8")

FP8_GROUP = 128
"""Latent values that share one fp32 scale in `fp8_ds_mla` (FlashMLA's V3.2 layout)."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """One token's MLA latent KV in one layer.

    `float32` and `bfloat16` are latent then rope in that dtype. `fp8_ds_mla` is `latent_dim` e4m3,
    then one fp32 scale per 128 of them, then the rope part in bf16 (656 B at 512 + 64).

    Raises:
        ConfigError: an unknown name, or a latent_dim that fp8_ds_mla can't group by 128.
    """

    name: str
    latent_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        if self.name not in ROW_FORMATS:
            raise ConfigError(
                f"--kv-cache-dtype {self.name!r} is not one of {', '.join(ROW_FORMATS)}"
            )
        if self.name == "fp8_ds_mla" and self.latent_dim % FP8_GROUP:
            raise ConfigError(
                f"--kv-cache-dtype fp8_ds_mla needs kv_lora_rank to be a multiple of {FP8_GROUP},"
                f" this model has {self.latent_dim}; use bfloat16"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes a token a layer."""
        if self.name == "fp8_ds_mla":
            return self.latent_dim + 4 * (self.latent_dim // FP8_GROUP) + 2 * self.rope_dim
        return _ITEM_BYTES[self.name] * (self.latent_dim + self.rope_dim)


@dataclass(frozen=True, kw_only=True)
class IndexKeyFormat:
    """One page of 64 indexer keys in one layer.

    `float32` and `bfloat16` pages are [64, head_dim]. An `fp8` page is 64 x head_dim e4m3, then 64
    fp32 scales: what DeepGEMM's paged logits read (132 B a token at head_dim 128).

    Raises:
        ConfigError: an unknown name.
    """

    name: str
    head_dim: int

    def __post_init__(self) -> None:
        if self.name not in INDEX_KEY_FORMATS:
            raise ConfigError(
                f"--index-key-dtype {self.name!r} is not one of {', '.join(INDEX_KEY_FORMATS)}"
            )

    @property
    def key_bytes(self) -> int:
        """Bytes a token a layer."""
        if self.name == "fp8":
            return self.head_dim + 4
        return _ITEM_BYTES[self.name] * self.head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes a page of 64 tokens a layer."""
        return self.key_bytes * BLOCK_TOKENS
