"""How large the pools of a decode benchmark are: from flags, or from equal bytes of HBM.

A pure function of sizes.
"""

from dataclasses import dataclass

from echokv.bench.decode_engine import PoolSizes
from echokv.config import ModelConfig
from echokv.errors import ConfigError
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

_STATE_BYTES = (4, 13)
"""Mappings and priorities a layer: bytes a host slot, bytes a device slot (`cache.state`)."""

_RESIDENT_BYTES = 5
"""Bytes that a slot has besides its row and key without offload, all layers (`cache.resident`)."""

_ROWS_PER_REQUEST = 4
"""Device rows a running request when they are chosen here, in selections (`index_topk` rows)."""


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """HBM bytes of one token in all layers."""

    host_slot: int  # index key and mapping
    device_slot: int  # row and its state
    resident: int  # everything, without offload

    @classmethod
    def of(cls, model: ModelConfig, rows: RowFormat, keys: IndexKeyFormat) -> "TokenBytes":
        """What the byte plan counts (`memory.plan`)."""
        layers = model.num_hidden_layers
        key = keys.key_bytes * len(model.index_layers)
        row = rows.row_bytes * layers
        return cls(
            host_slot=key + _STATE_BYTES[0] * layers,
            device_slot=row + _STATE_BYTES[1] * layers,
            resident=row + key + _RESIDENT_BYTES,
        )


def sizes_for_batch(
    model: ModelConfig, *, offload: bool, batch: int, longest: int, device_tokens: int | None,
    host_tokens: int | None,
) -> PoolSizes:  # fmt: skip
    """Pools that hold `batch` requests of `longest` tokens, or as large as was asked for.

    Args:
        model: of the run.
        offload: whether rows are in host memory.
        batch: requests running at once.
        longest: most tokens of prompt and output together.
        device_tokens: --device-pool-tokens; None: 4 selections a request and one more request's,
            without offload every token.
        host_tokens: --host-pool-tokens; None: every token.

    Raises:
        ConfigError: a pool that can't hold one request.
    """
    needed = batch * blocks_for(longest) * BLOCK_TOKENS
    if offload:
        slots = needed if host_tokens is None else _whole_blocks(host_tokens)
        device = device_tokens or min((_ROWS_PER_REQUEST * batch + 1) * model.index_topk, slots)
        device = max(device, (batch + 1) * model.index_topk) if device_tokens is None else device
    else:
        slots = device = needed if device_tokens is None else _whole_blocks(device_tokens)
    if slots < blocks_for(longest) * BLOCK_TOKENS:
        flag = "--host-pool-tokens" if offload else "--device-pool-tokens"
        raise ConfigError(f"{flag} {slots} can't hold one request of {longest} tokens")
    return PoolSizes(
        offload=offload, batch=batch, max_model_len=longest, host_tokens=slots, device_tokens=device
    )


def sizes_for_bytes(
    model: ModelConfig, each: TokenBytes, *, offload: bool, hbm_bytes: int, longest: int,
    max_host_tokens: int | None,
) -> PoolSizes:  # fmt: skip
    """Pools for as many requests as so many bytes of HBM allow.

    With offload a request takes its index keys, its mappings and 4 selections of device rows; what
    whole requests leave over goes to the device pool.

    Args:
        model: of the run.
        each: bytes of a token.
        offload: whether rows are in host memory.
        hbm_bytes: for rows, index keys and metadata.
        longest: most tokens of prompt and output together.
        max_host_tokens: what host memory holds; None: no limit.

    Raises:
        ConfigError: not even one request fits.
    """
    tokens = blocks_for(longest) * BLOCK_TOKENS
    if offload:
        spare = model.index_topk * each.device_slot  # room to turn over one request's rows
        request = tokens * each.host_slot + _ROWS_PER_REQUEST * spare
        batch = (hbm_bytes - spare) // request
        if max_host_tokens is not None:
            batch = min(batch, max_host_tokens // tokens)
    else:
        request = tokens * each.resident
        batch = hbm_bytes // request
    if batch < 1:
        raise ConfigError(
            f"--kv-hbm-gb {hbm_bytes / 1e9}: one request of {longest} tokens takes"
            f" {request / 1e9:.2f} GB {'with' if offload else 'without'} offload"
        )
    slots = batch * tokens
    left = hbm_bytes - slots * each.host_slot
    return PoolSizes(
        offload=offload,
        batch=batch,
        max_model_len=longest,
        host_tokens=slots,
        device_tokens=left // each.device_slot if offload else slots,
    )


def _whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
