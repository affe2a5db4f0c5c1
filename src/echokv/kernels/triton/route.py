"""Which experts a token goes to; contract in `kernels/reference/route.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.route import check_route_args


def route(
    logits: Tensor,
    bias: Tensor,
    *,
    groups: int,
    chosen_groups: int,
    chosen: int,
    normalise: bool,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Weights [T, chosen] and experts [T, chosen] of logits [T, E]; ties to the lower number."""
    check_route_args(logits, bias, groups, chosen_groups, chosen)
    tokens, experts = logits.shape
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    numbers = torch.empty(tokens, chosen, dtype=torch.int64, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, bias, weights, numbers, experts, factor, groups, chosen_groups, chosen,
            triton.next_power_of_2(groups), triton.next_power_of_2(experts // groups),
            triton.next_power_of_2(chosen), normalise, num_warps=1,
        )  # fmt: skip
    return weights, numbers


@triton.jit
def _route(
    logits,  # [T, experts]
    bias,  # [experts]
    weights,  # [T, CHOSEN] out
    numbers,  # [T, CHOSEN] int64 out
    experts,
    factor,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_EACH: tl.constexpr,  # experts of a group
    BLOCK_CHOSEN: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Program (token); best first, one maximum at a time."""
    token = tl.program_id(0).to(tl.int64)
    each = experts // GROUPS
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    member = tl.arange(0, BLOCK_EACH)[None, :]
    number = group * each + member
    valid = (group < GROUPS) & (member < each)
    nothing = float("-inf")
    score = tl.sigmoid(tl.load(logits + token * experts + number, mask=valid, other=0.0))
    choice = score + tl.load(bias + number, mask=valid, other=0.0)
    choice = tl.where(valid & (choice == choice), choice, nothing)
    if GROUPS > 1:
        best = tl.max(choice, axis=1)
        first = tl.min(tl.where(choice == best[:, None], member, BLOCK_EACH), axis=1)
        second = tl.max(tl.where(member == first[:, None], nothing, choice), axis=1)
        strength = best + second  # -inf where there is no such group
        g = tl.arange(0, BLOCK_GROUPS)
        better = (strength[None, :] > strength[:, None]) | (
            (strength[None, :] == strength[:, None]) & (g[None, :] < g[:, None])
        )
        rank = tl.sum(better.to(tl.int32), axis=1)
        choice = tl.where(rank[:, None] < CHOSEN_GROUPS, choice, nothing)
    place = tl.arange(0, BLOCK_CHOSEN)
    kept = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    taken = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    for i in tl.static_range(CHOSEN):
        top = tl.max(tl.max(choice, axis=1), axis=0)
        candidates = tl.where((choice == top) & valid, number, experts)
        winner = tl.min(tl.min(candidates, axis=1), axis=0)
        weight = tl.sum(tl.sum(tl.where(number == winner, score, 0.0), axis=1), axis=0)
        kept = tl.where(place == i, weight, kept)
        taken = tl.where(place == i, winner, taken)
        choice = tl.where(number == winner, nothing, choice)
    if NORMALISE:
        kept = kept / (tl.sum(kept, axis=0) + 1e-20)
    target = token * CHOSEN + place
    tl.store(weights + target, kept * factor, mask=place < CHOSEN)
    tl.store(numbers + target, taken.to(tl.int64), mask=place < CHOSEN)


COMPILE_SIGNATURES = (
    (
        _route,
        {"logits": "*fp32", "bias": "*fp32", "weights": "*fp32", "numbers": "*i64",
         "experts": "i32:16", "factor": "fp32", "GROUPS": 8, "CHOSEN_GROUPS": 4, "CHOSEN": 8,
         "BLOCK_GROUPS": 8, "BLOCK_EACH": 32, "BLOCK_CHOSEN": 8, "NORMALISE": True},
        {"num_warps": 1},
    ),
)  # fmt: skip
