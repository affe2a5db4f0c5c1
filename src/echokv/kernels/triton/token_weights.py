"""Probabilities as integers, in one pass over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.token_weights import (
    GROUP,
    LOWEST_TEMPERATURE,
    check_token_weights,
)

_BLOCK = 1024


@triton.jit
def _token_weights(
    logits,  # [S, width]
    best,  # [S]
    temperature,  # [S]
    min_p,  # [S]
    weights,  # [S, width] out
    sums,  # [S, groups] out
    width,
    groups,
    SCALE: tl.constexpr,
    LOWEST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block, row)."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < width
    logit = tl.load(logits + row * width + token, mask=inside, other=-float("inf"))
    distance = logit.to(tl.float64) - tl.load(best + row).to(tl.float64)
    share = tl.exp(distance / tl.maximum(tl.load(temperature + row), LOWEST))
    weight = tl.floor(share * SCALE + 0.5).to(tl.int64)
    weight = tl.where(inside & (share >= tl.load(min_p + row)), weight, 0)
    tl.store(weights + row * width + token, weight, mask=inside)
    total = tl.sum(tl.reshape(weight, (BLOCK // GROUP, GROUP)), axis=1)
    group = tl.program_id(0) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(sums + row * groups + group, total, mask=group < groups)


def token_weights(
    logits: Tensor, best: Tensor, temperature: Tensor, min_p: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Weigh tokens by their probability; see `reference.token_weights`."""
    check_token_weights(logits, best, temperature, min_p)
    rows, width = logits.shape
    groups = triton.cdiv(width, GROUP)
    weights = torch.empty((rows, width), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, groups), dtype=torch.int64, device=logits.device)
    if rows:
        _token_weights[(triton.cdiv(width, _BLOCK), rows)](
            logits,
            best,
            temperature,
            min_p,
            weights,
            sums,
            width,
            groups,
            SCALE=2.0**bits,
            LOWEST=LOWEST_TEMPERATURE,
            GROUP=GROUP,
            BLOCK=_BLOCK,
        )
    return weights, sums


COMPILE_SIGNATURES = (
    (
        _token_weights,
        {"logits": "*fp32", "best": "*fp32", "temperature": "*fp64", "min_p": "*fp64"}
        | {"weights": "*i64", "sums": "*i64", "width": "i32", "groups": "i32", "SCALE": 2.0**36}
        | {"LOWEST": LOWEST_TEMPERATURE, "GROUP": GROUP, "BLOCK": _BLOCK},
    ),
)
