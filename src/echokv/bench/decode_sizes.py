"""How large the pools of a decode benchmark are: from flags, or from equal bytes of HBM.

A pure function of sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from echokv.bench.decode_engine import PoolSizes
from echokv.config import ModelConfig
from echokv.errors import ConfigError
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.sizes import metadata_bytes
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

_ROWS_PER_REQUEST = 4
"""Device rows a running request when they are chosen here, in selections (`index_topk` rows)."""

_FEWEST_ROWS_PER_REQUEST = 3
"""The same where HBM is short: what 18 requests have in the paper's smallest pool, 110K rows."""


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """HBM bytes of one token in all layers."""

    host_slot: int  # index key and mapping
    device_slot: int  # row and its state
    resident: int  # everything, without offload

    @classmethod
    def of(cls, model: ModelConfig, rows: RowFormat, keys: IndexKeyFormat) -> "TokenBytes":
        """What the byte plan counts."""
        layers = model.num_hidden_layers
        key = keys.key_bytes * len(model.index_layers)
        row = rows.row_bytes * layers
        host_state, device_state = metadata_bytes(layers, offload=True)
        return cls(
            host_slot=key + host_state,
            device_slot=row + device_state,
            resident=row + key + sum(metadata_bytes(layers, offload=False)),
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
    model: ModelConfig, each: TokenBytes, *, offload: bool, hbm_bytes: int,
    lengths: Sequence[int], max_host_tokens: int | None,
) -> PoolSizes:  # fmt: skip
    """Pools for the first of some requests: for as many as so many bytes of HBM allow.

    With offload a request takes its index keys, its mappings and 3 selections of device rows; what
    whole requests leave over goes to the device pool.

    Args:
        model: of the run.
        each: bytes of a token.
        offload: whether rows are in host memory.
        hbm_bytes: for rows, index keys and metadata.
        lengths: tokens of prompt and output of each request, in the order in which they come.
        max_host_tokens: what host memory holds; None: no limit.

    Raises:
        ConfigError: not even the first request fits.
    """
    token = each.host_slot if offload else each.resident
    selection = model.index_topk * each.device_slot if offload else 0
    batch = slots = 0
    for length in lengths:
        tokens = slots + blocks_for(length) * BLOCK_TOKENS
        # One selection more than theirs: room to turn over one request's rows.
        selections = _FEWEST_ROWS_PER_REQUEST * (batch + 1) + 1
        if tokens * token + selections * selection > hbm_bytes:
            break
        if max_host_tokens is not None and tokens > max_host_tokens:
            break
        batch, slots = batch + 1, tokens
    if batch == 0:
        needed = blocks_for(lengths[0]) * BLOCK_TOKENS * token
        needed += (_FEWEST_ROWS_PER_REQUEST + 1) * selection
        raise ConfigError(
            f"--kv-hbm-gb {hbm_bytes / 1e9}: one request of {lengths[0]} tokens takes"
            f" {needed / 1e9:.2f} GB {'with' if offload else 'without'} offload, host memory is to"
            f" hold {max_host_tokens or 'any number of'} tokens"
        )
    left = hbm_bytes - slots * each.host_slot
    return PoolSizes(
        offload=offload,
        batch=batch,
        max_model_len=max(lengths[:batch]),
        host_tokens=slots,
        device_tokens=left // each.device_slot if offload else slots,
    )


def _whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
