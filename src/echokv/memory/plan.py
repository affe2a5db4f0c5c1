"""The byte budget: what goes where, how many tokens each pool holds, how many requests can run.

A pure function of sizes: it reads no machine and allocates nothing.
"""

from echokv.config import EngineConfig, ModelConfig
from echokv.errors import CapacityError, ConfigError
from echokv.memory.byte_plan import BytePlan, PlanLine, gib
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.sizes import Sizes
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

CPU_HOST_POOL_BYTES = 2 * 2**30
"""Largest host pool that is chosen unasked on a machine without a GPU."""

DEFAULT_HOST_REQUESTS = 64
"""A host pool that is chosen unasked holds at most this many requests of max_model_len."""

_GIB = 2**30

__all__ = ["BytePlan", "PlanLine", "make_plan"]


def make_plan(
    model: ModelConfig,
    config: EngineConfig,
    row_format: RowFormat,
    index_key_format: IndexKeyFormat,
    *,
    weight_bytes: int,
    device_bytes: int | None,
    host_bytes: int,
) -> BytePlan:
    """Decide every size.

    Chosen unasked: the host pool is half of host_bytes, at most 64 requests of max_model_len, on a
    CPU at most 2 GiB, and no larger than its index keys allow (they may take half of the HBM that
    weights and workspace leave, or what an explicit device pool leaves). The device pool is the
    rest of the HBM; on a CPU it is a quarter of the host pool.

    Args:
        model: layers, top-k and sizes.
        config: resolved; max_model_len None is the model's limit.
        row_format: bytes of a row.
        index_key_format: bytes of an index key.
        weight_bytes: bytes of the loaded weights.
        device_bytes: HBM free before anything is loaded, None on a CPU.
        host_bytes: host memory that may be used, before anything is loaded.

    Raises:
        CapacityError: something doesn't fit; with the numbers and the flag to change.
        ConfigError: flags that contradict each other.
    """
    max_model_len = config.max_model_len or model.max_position_embeddings
    sizes = Sizes.of(
        model,
        config,
        row_format,
        index_key_format,
        weight_bytes=weight_bytes,
        on_device=device_bytes is not None,
    )
    if device_bytes is not None and sizes.fixed_bytes >= device_bytes:
        raise CapacityError(
            f"weights {gib(weight_bytes)} and workspace {gib(sizes.workspace_bytes)} exceed the"
            f" {gib(device_bytes)} of HBM that are free"
        )
    if config.offload:
        host_slots = _host_slots(config, sizes, max_model_len, device_bytes, host_bytes)
        device_slots = _device_slots(config, sizes, host_slots, device_bytes)
        max_running = min(config.max_num_seqs, device_slots // sizes.topk - 1)
    else:
        host_slots = _resident_slots(config, sizes, max_model_len, device_bytes, host_bytes)
        device_slots, max_running = host_slots, config.max_num_seqs
    _require_one_request(config, sizes, host_slots, max_model_len)
    return BytePlan(
        lines=_lines(config, sizes, host_slots, device_slots, device_bytes),
        device_limit_bytes=device_bytes,
        host_limit_bytes=host_bytes,
        offload=config.offload,
        host_slots=host_slots,
        device_slots=device_slots,
        max_model_len=max_model_len,
        max_running=max_running,
    )


def _host_slots(
    config: EngineConfig,
    sizes: Sizes,
    max_model_len: int,
    device_bytes: int | None,
    host_bytes: int,
) -> int:
    """N_H with offload."""
    if config.host_pool_gib is not None:
        asked = int(config.host_pool_gib * _GIB)
        if asked > host_bytes:
            raise CapacityError(
                f"--host-pool-gib {config.host_pool_gib} exceeds the {gib(host_bytes)} of host"
                " memory that are available"
            )
        slots = _whole_blocks(asked // sizes.row_bytes)
    else:
        slots = _default_host_slots(config, sizes, max_model_len, device_bytes, host_bytes)
    if device_bytes is not None:
        needed = sizes.fixed_bytes + slots * sizes.host_slot_bytes
        if needed > device_bytes:
            raise CapacityError(
                f"index keys and mappings of {slots} host slots take"
                f" {gib(slots * sizes.host_slot_bytes)} of HBM; with weights and workspace that"
                f" is {gib(needed)} of {gib(device_bytes)}: lower --host-pool-gib"
            )
    return slots


def _default_host_slots(
    config: EngineConfig,
    sizes: Sizes,
    max_model_len: int,
    device_bytes: int | None,
    host_bytes: int,
) -> int:
    budget = host_bytes // 2
    if device_bytes is None:
        budget = min(budget, CPU_HOST_POOL_BYTES)
    slots = budget // sizes.row_bytes
    slots = min(slots, DEFAULT_HOST_REQUESTS * blocks_for(max_model_len) * BLOCK_TOKENS)
    if device_bytes is not None:
        left = device_bytes - sizes.fixed_bytes
        if config.device_pool_tokens is None:
            room = left // 2
        else:
            room = max(0, left - config.device_pool_tokens * sizes.device_slot_bytes)
        slots = min(slots, room // sizes.host_slot_bytes)
    return _whole_blocks(slots)


def _device_slots(
    config: EngineConfig, sizes: Sizes, host_slots: int, device_bytes: int | None
) -> int:
    """N_G with offload."""
    needed = 2 * sizes.topk  # one running request, and room to turn over its rows
    left = None
    if device_bytes is not None:
        left = device_bytes - sizes.fixed_bytes - host_slots * sizes.host_slot_bytes
    if config.device_pool_tokens is not None:
        slots = config.device_pool_tokens
    elif left is None:
        slots = max(host_slots // 4, needed)
    else:
        slots = max(min(left // sizes.device_slot_bytes, host_slots), 0)
    if slots < needed:
        raise CapacityError(
            f"the device pool has {slots} slots a layer, one running request needs"
            f" 2 x index_topk = {needed}: raise --device-pool-tokens, or lower --host-pool-gib"
            " where index keys leave it no room"
        )
    if left is not None and slots * sizes.device_slot_bytes > left:
        raise CapacityError(
            f"--device-pool-tokens {slots} takes {gib(slots * sizes.device_slot_bytes)} of HBM;"
            f" weights, workspace and index keys leave {gib(left)}"
        )
    return slots


def _resident_slots(
    config: EngineConfig,
    sizes: Sizes,
    max_model_len: int,
    device_bytes: int | None,
    host_bytes: int,
) -> int:
    """Slots without offload: as many as device memory holds, or as were asked for."""
    if config.host_pool_gib is not None:
        raise ConfigError(
            f"--host-pool-gib {config.host_pool_gib} contradicts --no-offload, which has no host"
            " pool; --device-pool-tokens sets its size"
        )
    each = sizes.device_slot_bytes + sizes.host_slot_bytes
    if device_bytes is None:
        budget = min(host_bytes // 2, CPU_HOST_POOL_BYTES)
    else:
        budget = device_bytes - sizes.fixed_bytes
    limit = budget // each
    if config.device_pool_tokens is None:
        wanted = DEFAULT_HOST_REQUESTS * blocks_for(max_model_len) * BLOCK_TOKENS
        return _whole_blocks(min(limit, wanted))
    slots = _whole_blocks(config.device_pool_tokens)
    ceiling = limit if device_bytes is not None else host_bytes // each
    if slots > ceiling:
        raise CapacityError(
            f"--device-pool-tokens {slots} without offload takes {gib(slots * each)};"
            f" {gib(ceiling * each)} are left"
        )
    return slots


def _require_one_request(
    config: EngineConfig, sizes: Sizes, host_slots: int, max_model_len: int
) -> None:
    needed = blocks_for(max_model_len) * BLOCK_TOKENS
    if host_slots >= needed:
        return
    if config.offload:
        raise CapacityError(
            f"one request of --max-model-len {max_model_len} needs {needed} host slots"
            f" ({gib(needed * sizes.row_bytes)}), the host pool has {host_slots}"
            f" ({gib(host_slots * sizes.row_bytes)}): raise --host-pool-gib or lower"
            " --max-model-len"
        )
    raise CapacityError(
        f"one request of --max-model-len {max_model_len} needs {needed} slots, without offload"
        f" there are {host_slots}: raise --device-pool-tokens, lower --max-model-len or offload"
    )


def _lines(
    config: EngineConfig,
    sizes: Sizes,
    host_slots: int,
    device_slots: int,
    device_bytes: int | None,
) -> tuple[PlanLine, ...]:
    place = "host" if device_bytes is None else "HBM"
    metadata = host_slots * sizes.host_metadata_bytes + device_slots * sizes.device_metadata_bytes
    lines = [
        PlanLine(name="weights", place=place, nbytes=sizes.weight_bytes, tokens=None),
        PlanLine(
            name="device pool",
            place=place,
            nbytes=device_slots * sizes.row_bytes,
            tokens=device_slots,
        ),
        PlanLine(
            name="index keys", place=place, nbytes=host_slots * sizes.key_bytes, tokens=host_slots
        ),
        PlanLine(name="metadata", place=place, nbytes=metadata, tokens=None),
        PlanLine(
            name="workspace",
            place=place,
            nbytes=sizes.workspace_bytes,
            tokens=None,
            is_bound=True,
        ),
    ]
    if config.offload:
        lines.append(
            PlanLine(
                name="host pool",
                place="host",
                nbytes=host_slots * sizes.row_bytes,
                tokens=host_slots,
            )
        )
    return tuple(lines)


def _whole_blocks(slots: int) -> int:
    return slots // BLOCK_TOKENS * BLOCK_TOKENS
