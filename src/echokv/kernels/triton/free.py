"""Make room in one layer's device pool: evict the lowest priorities.

An exact radix select over the 31 bits of a priority, 11 + 10 + 10, with the number of victims
known only on the device: three histogram kernels, then one counts victims by blocks, then one
evicts them in slot order. Every program works a digit out for itself from the global histograms.
Where nothing is needed each kernel ends at once.
"""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.cache_args import check_layer, check_scalars, check_workspace
from echokv.kernels.triton.blocks import (
    COUNTS_A,
    COUNTS_B,
    COUNTS_C,
    HISTOGRAM_INTS,
    HISTOGRAMS,
    SCALARS,
    block_size,
    grid_size,
    rank_in_block,
    sum_of_blocks,
)

_HIGH: tl.constexpr = tl.constexpr(2048)  # bins of the first digit, bits 20 to 30
_LOW: tl.constexpr = tl.constexpr(1024)  # bins of the second and third, bits 10 to 19 and 0 to 9
_ALL_BINS: tl.constexpr = tl.constexpr(HISTOGRAM_INTS)


@triton.jit
def _add_histogram(histogram, digit, counted, BINS: tl.constexpr):
    """Add a block's histogram of digit, where counted, to the global one."""
    counts = tl.histogram(tl.where(counted, digit, 0), BINS, mask=counted)
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _find_bin(histogram, rank, BINS: tl.constexpr):
    """The bin that holds the rank-th entry from below (from 1), and the rank within it."""
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram + bins)
    below = tl.cumsum(counts, axis=0) < rank
    chosen = tl.sum(below.to(tl.int32))
    return chosen, rank - tl.sum(tl.where(below, counts, 0))


@triton.jit
def _num_victims(needed, free_counts, histograms, programs, PROGRAMS: tl.constexpr):
    """Slots to evict: the shortage, but no more than there are candidates."""
    num_free, _ = sum_of_blocks(free_counts, programs, 0, PROGRAMS)
    candidates = tl.sum(tl.load(histograms + tl.arange(0, _HIGH)))
    return tl.minimum(tl.maximum(needed - num_free, 0), candidates)


@triton.jit
def _load_block(priority, floor, slots, BLOCK: tl.constexpr):
    """Priorities of this program's slots, and which of them may be evicted."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    level = tl.load(priority + index, mask=index < slots, other=-1)
    return index, level, (level >= 0) & (level < tl.load(floor))


@triton.jit
def _count_free_and_high(
    num_needed, floor, device_free, priority, free_counts, histograms, slots, BLOCK: tl.constexpr
):
    if tl.load(num_needed) > 0:
        index, level, candidate = _load_block(priority, floor, slots, BLOCK)
        is_free = tl.load(device_free + index, mask=index < slots, other=0).to(tl.int32)
        tl.store(free_counts + tl.program_id(0), tl.sum(is_free))
        _add_histogram(histograms, level >> 20, candidate, _HIGH)


@triton.jit
def _count_middle(
    num_needed,
    floor,
    priority,
    free_counts,
    histograms,
    slots,
    programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    needed = tl.load(num_needed)
    if needed > 0:
        victims = _num_victims(needed, free_counts, histograms, programs, PROGRAMS)
        if victims > 0:
            high, _ = _find_bin(histograms, victims, _HIGH)
            _, level, candidate = _load_block(priority, floor, slots, BLOCK)
            counted = candidate & ((level >> 20) == high)
            _add_histogram(histograms + _HIGH, (level >> 10) & 1023, counted, _LOW)


@triton.jit
def _count_low(
    num_needed,
    floor,
    priority,
    free_counts,
    histograms,
    slots,
    programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    needed = tl.load(num_needed)
    if needed > 0:
        victims = _num_victims(needed, free_counts, histograms, programs, PROGRAMS)
        if victims > 0:
            high, rank = _find_bin(histograms, victims, _HIGH)
            middle, _ = _find_bin(histograms + _HIGH, rank, _LOW)
            _, level, candidate = _load_block(priority, floor, slots, BLOCK)
            counted = candidate & ((level >> 10) == (high << 10) + middle)
            _add_histogram(histograms + _HIGH + _LOW, level & 1023, counted, _LOW)


@triton.jit
def _count_victims(
    num_needed,
    floor,
    priority,
    free_counts,
    below_counts,  # [programs] out: slots below the threshold
    equal_counts,  # [programs] out: slots at it
    histograms,
    scalars,  # [3] out: victims, threshold, victims at the threshold
    slots,
    programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    needed = tl.load(num_needed)
    if needed > 0:
        program = tl.program_id(0)
        victims = _num_victims(needed, free_counts, histograms, programs, PROGRAMS)
        if program == 0:
            tl.store(scalars, victims)
        if victims > 0:
            high, rank = _find_bin(histograms, victims, _HIGH)
            middle, rank = _find_bin(histograms + _HIGH, rank, _LOW)
            low, rank = _find_bin(histograms + _HIGH + _LOW, rank, _LOW)
            threshold = (high << 20) + (middle << 10) + low
            _, level, candidate = _load_block(priority, floor, slots, BLOCK)
            below = (candidate & (level < threshold)).to(tl.int32)
            equal = (candidate & (level == threshold)).to(tl.int32)
            tl.store(below_counts + program, tl.sum(below))
            tl.store(equal_counts + program, tl.sum(equal))
            if program == 0:
                tl.store(scalars + 1, threshold)
                tl.store(scalars + 2, rank)


@triton.jit
def _evict(
    num_needed,
    floor,
    device_free,
    priority,
    device_to_host,
    host_to_device,
    slot_buffer,
    num_freed,
    below_counts,
    equal_counts,
    histograms,
    scalars,
    slots,
    programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    program = tl.program_id(0)
    index = program * BLOCK + tl.arange(0, BLOCK)
    none = tl.full([BLOCK], -1, tl.int32)
    victims = 0
    if tl.load(num_needed) > 0:
        victims = tl.load(scalars)
    tl.store(slot_buffer + index, none, mask=(index >= victims) & (index < slots))
    if program == 0:
        tl.store(num_freed, victims)
        if tl.load(num_needed) > 0:  # nobody reads the histograms any more
            bins = tl.arange(0, _ALL_BINS)
            tl.store(histograms + bins, tl.zeros([_ALL_BINS], tl.int32))
    if victims > 0:
        threshold = tl.load(scalars + 1)
        at_threshold = tl.load(scalars + 2)
        _, below_before = sum_of_blocks(below_counts, programs, program, PROGRAMS)
        _, equal_before = sum_of_blocks(equal_counts, programs, program, PROGRAMS)
        _, level, candidate = _load_block(priority, floor, slots, BLOCK)
        equal = candidate & (level == threshold)
        chosen = equal & (equal_before + rank_in_block(equal.to(tl.int32)) < at_threshold)
        gone = (candidate & (level < threshold)) | chosen
        place = (
            below_before + tl.minimum(equal_before, at_threshold) + rank_in_block(gone.to(tl.int32))
        )
        tl.store(slot_buffer + place, index, mask=gone)
        owner = tl.load(device_to_host + index, mask=gone, other=0)
        tl.store(host_to_device + owner.to(tl.int64), none, mask=gone)
        tl.store(device_to_host + index, none, mask=gone)
        tl.store(priority + index, none, mask=gone)
        tl.store(device_free + index, tl.full([BLOCK], 1, tl.uint8), mask=gone)


def free(
    num_needed: Tensor,
    floor: Tensor,
    device_free: Tensor,
    priority: Tensor,
    device_to_host: Tensor,
    host_to_device: Tensor,
    slot_buffer: Tensor,
    num_freed: Tensor,
    workspace: Tensor,
) -> None:
    """Evict until num_needed slots are free, or nothing more may go; see `reference.free`."""
    check_layer(device_free, priority, device_to_host, host_to_device, slot_buffer)
    check_scalars(priority.device, num_needed=num_needed, floor=floor, num_freed=num_freed)
    check_workspace(workspace, priority.device)
    slots = priority.shape[0]
    block = block_size(slots)
    programs, padded = grid_size(slots)
    free_counts, below_counts = workspace[COUNTS_A:], workspace[COUNTS_B:]
    equal_counts, histograms = workspace[COUNTS_C:], workspace[HISTOGRAMS:]
    scalars = workspace[SCALARS:]
    grid, sizes = (programs,), {"BLOCK": block, "PROGRAMS": padded}
    _count_free_and_high[grid](
        num_needed, floor, device_free, priority, free_counts, histograms, slots, BLOCK=block
    )
    for count in (_count_middle, _count_low):
        count[grid](num_needed, floor, priority, free_counts, histograms, slots, programs, **sizes)
    _count_victims[grid](
        num_needed,
        floor,
        priority,
        free_counts,
        below_counts,
        equal_counts,
        histograms,
        scalars,
        slots,
        programs,
        **sizes,
    )
    _evict[grid](
        num_needed,
        floor,
        device_free,
        priority,
        device_to_host,
        host_to_device,
        slot_buffer,
        num_freed,
        below_counts,
        equal_counts,
        histograms,
        scalars,
        slots,
        programs,
        **sizes,
    )


_INTS = "*i32"
_SIZES = {"slots": "i32", "programs": "i32", "BLOCK": 1024, "PROGRAMS": 256}
_FOR_DIGIT = (
    dict.fromkeys(("num_needed", "floor", "priority", "free_counts", "histograms"), _INTS) | _SIZES
)
COMPILE_SIGNATURES = (
    (
        _count_free_and_high,
        {
            "num_needed": _INTS,
            "floor": _INTS,
            "device_free": "*u8",
            "priority": _INTS,
            "free_counts": _INTS,
            "histograms": _INTS,
            "slots": "i32",
            "BLOCK": 1024,
        },
    ),
    (_count_middle, _FOR_DIGIT),
    (_count_low, _FOR_DIGIT),
    (
        _count_victims,
        dict.fromkeys(
            (
                "num_needed",
                "floor",
                "priority",
                "free_counts",
                "below_counts",
                "equal_counts",
                "histograms",
                "scalars",
            ),
            _INTS,
        )
        | _SIZES,
    ),
    (
        _evict,
        {"num_needed": _INTS, "floor": _INTS, "device_free": "*u8"}
        | dict.fromkeys(
            (
                "priority",
                "device_to_host",
                "host_to_device",
                "slot_buffer",
                "num_freed",
                "below_counts",
                "equal_counts",
                "histograms",
                "scalars",
            ),
            _INTS,
        )
        | _SIZES,
    ),
)
