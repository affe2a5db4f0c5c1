"""Which of the wanted host slots are resident, which are missing.

Every absent entry claims its host slot with the lowest number it can, so that the last index wins;
then winners are counted by blocks and compacted in index order. Three kernels, or one program
where the entries are few.
"""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_maps, check_scalars, check_workspace
from echokv.kernels.triton.blocks import (
    COUNTS_A,
    COUNTS_B,
    block_size,
    grid_size,
    rank_in_block,
    sum_of_blocks,
)

_FEW = 2048
"""Entries up to which one program does everything: one token's selection, or a decode batch."""

_FEW_WARPS = 8


@triton.jit
def _claim(
    host_slots,  # [entries]
    priorities,  # [entries]
    floor,  # [1]
    host_to_device,  # [N_H]
    priority,  # [N_G]
    hit_counts,  # [programs] out
    entries,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(host_slots + index, mask=index < entries, other=-1)
    wanted = slot >= 0
    where = slot.to(tl.int64)
    device_slot = tl.load(host_to_device + where, mask=wanted, other=-1)
    # Other programs may be claiming: whatever is below -1 is an absent slot too.
    hit = wanted & (device_slot >= 0)
    level = tl.load(priorities + index, mask=hit, other=-1)
    old = tl.atomic_max(priority + device_slot, level, mask=hit, sem="relaxed")
    protected = tl.load(floor)
    first = hit & (old <= protected) & (level > protected)
    tl.store(hit_counts + tl.program_id(0), tl.sum(first.to(tl.int32)))
    tl.atomic_min(host_to_device + where, -2 - index, mask=wanted & ~hit, sem="relaxed")


@triton.jit
def _lookup_few(
    host_slots,
    priorities,
    floor,
    host_to_device,
    priority,
    missing,
    num_missing,
    num_hits,
    entries,
    BLOCK: tl.constexpr,
):
    """All of it in one program: barriers take the place of kernel boundaries."""
    _claim(host_slots, priorities, floor, host_to_device, priority, num_hits, entries, BLOCK)
    tl.debug_barrier()
    index = tl.arange(0, BLOCK)
    slot = tl.load(host_slots + index, mask=index < entries, other=-1)
    where = slot.to(tl.int64)
    # Past the L1 cache, which may hold what was there before the atomics.
    claim = tl.load(host_to_device + where, mask=slot >= 0, other=-1, cache_modifier=".cg")
    tl.debug_barrier()
    won = claim == -2 - index
    total = tl.sum(won.to(tl.int32))
    none = tl.full([BLOCK], -1, tl.int32)
    tl.store(missing + rank_in_block(won.to(tl.int32)), slot, mask=won)
    tl.store(missing + index, none, mask=(index >= total) & (index < entries))
    tl.store(host_to_device + where, none, mask=won)
    tl.store(num_missing, total)


@triton.jit
def _count_winners(host_slots, host_to_device, win_counts, entries, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(host_slots + index, mask=index < entries, other=-1)
    claim = tl.load(host_to_device + slot.to(tl.int64), mask=slot >= 0, other=-1)
    won = (claim == -2 - index).to(tl.int32)
    tl.store(win_counts + tl.program_id(0), tl.sum(won))


@triton.jit
def _compact_winners(
    host_slots,
    host_to_device,
    hit_counts,
    win_counts,
    missing,  # [entries] out
    num_missing,  # [1] out
    num_hits,  # [1] out
    entries,
    programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    total, before = sum_of_blocks(win_counts, programs, program, PROGRAMS)
    index = program * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(host_slots + index, mask=index < entries, other=-1)
    where = slot.to(tl.int64)
    claim = tl.load(host_to_device + where, mask=slot >= 0, other=-1)
    # Only the winner resets its slot. A loser reads the winner's claim or -1: neither is its own.
    won = claim == -2 - index
    rank = before + rank_in_block(won.to(tl.int32))
    tl.store(missing + rank, slot, mask=won)
    tl.store(host_to_device + where, tl.full([BLOCK], -1, tl.int32), mask=won)
    tl.store(
        missing + index,
        tl.full([BLOCK], -1, tl.int32),
        mask=(index >= total) & (index < entries),
    )
    if program == 0:
        hits, _ = sum_of_blocks(hit_counts, programs, 0, PROGRAMS)
        tl.store(num_missing, total)
        tl.store(num_hits, hits)


def lookup(
    host_slots: Tensor,
    priorities: Tensor,
    floor: Tensor,
    host_to_device: Tensor,
    priority: Tensor,
    missing: Tensor,
    num_missing: Tensor,
    num_hits: Tensor,
    workspace: Tensor,
) -> None:
    """Protect the resident entries and compact the absent ones; see `reference.lookup`."""
    device = priority.device
    check_maps(host_to_device, priority)
    check_entries(device, host_slots, priorities=priorities, missing=missing)
    check_scalars(device, floor=floor, num_missing=num_missing, num_hits=num_hits)
    check_workspace(workspace, device)
    entries = host_slots.shape[0]
    if entries <= _FEW:
        _lookup_few[(1,)](
            host_slots,
            priorities,
            floor,
            host_to_device,
            priority,
            missing,
            num_missing,
            num_hits,
            entries,
            BLOCK=max(triton.next_power_of_2(entries), 64),
            num_warps=_FEW_WARPS,
        )
        return
    block = block_size(entries)
    programs, padded = grid_size(entries)
    hit_counts, win_counts = workspace[COUNTS_A:], workspace[COUNTS_B:]
    grid = (programs,)
    _claim[grid](
        host_slots, priorities, floor, host_to_device, priority, hit_counts, entries, BLOCK=block
    )
    _count_winners[grid](host_slots, host_to_device, win_counts, entries, BLOCK=block)
    _compact_winners[grid](
        host_slots,
        host_to_device,
        hit_counts,
        win_counts,
        missing,
        num_missing,
        num_hits,
        entries,
        programs,
        BLOCK=block,
        PROGRAMS=padded,
    )


_INTS = "*i32"
COMPILE_SIGNATURES = (
    (
        _lookup_few,
        dict.fromkeys(
            (
                "host_slots",
                "priorities",
                "floor",
                "host_to_device",
                "priority",
                "missing",
                "num_missing",
                "num_hits",
            ),
            _INTS,
        )
        | {"entries": "i32", "BLOCK": _FEW},
        {"num_warps": _FEW_WARPS},
    ),
    (
        _claim,
        dict.fromkeys(
            ("host_slots", "priorities", "floor", "host_to_device", "priority", "hit_counts"), _INTS
        )
        | {"entries": "i32", "BLOCK": 1024},
    ),
    (
        _count_winners,
        dict.fromkeys(("host_slots", "host_to_device", "win_counts"), _INTS)
        | {"entries": "i32", "BLOCK": 1024},
    ),
    (
        _compact_winners,
        dict.fromkeys(
            (
                "host_slots",
                "host_to_device",
                "hit_counts",
                "win_counts",
                "missing",
                "num_missing",
                "num_hits",
            ),
            _INTS,
        )
        | {"entries": "i32", "programs": "i32", "BLOCK": 1024, "PROGRAMS": 256},
    ),
)
