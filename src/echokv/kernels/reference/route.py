"""Which experts a token goes to ("noaux_tc" of DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor


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
    """Choose by sigmoid plus bias, weigh by sigmoid.

    Groups compete by the sum of their two best experts; only experts of the best groups can be
    chosen.

    Args:
        logits: [T, E] float32.
        bias: [E] float32, the correction bias.
        groups: equal groups of experts; 1: no competition.
        chosen_groups: groups that win.
        chosen: experts a token.
        normalise: whether weights sum to 1 before the factor.
        factor: on the weights.

    Returns:
        weights [T, chosen] float32 and experts [T, chosen] int64, best choice first.
    """
    check_route_args(logits, bias, groups, chosen_groups, chosen)
    scores = logits.sigmoid()
    eligible = _without_losing_groups(scores + bias, groups, chosen_groups)
    experts = eligible.topk(chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor, experts


def _without_losing_groups(choice: Tensor, groups: int, chosen_groups: int) -> Tensor:
    """[T, E] with -inf at the experts of groups that lost."""
    if groups == 1:
        return choice
    grouped = choice.unflatten(1, (groups, choice.shape[1] // groups))  # [T, G, E / G]
    strength = grouped.topk(2, dim=-1).values.sum(-1)  # [T, G]
    winners = strength.topk(chosen_groups, dim=-1).indices
    lost = torch.ones_like(strength, dtype=torch.bool).scatter(1, winners, False)
    kept: Tensor = grouped.masked_fill(lost[:, :, None], float("-inf"))
    return kept.flatten(1)


def check_route_args(
    logits: Tensor, bias: Tensor, groups: int, chosen_groups: int, chosen: int
) -> None:
    """Raise ValueError unless `route` can take these."""
    check_tensor("logits", logits, (None, None), torch.float32)
    experts = logits.shape[1]
    check_tensor("bias", bias, (experts,), torch.float32, device=logits.device)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise ValueError(f"{experts} experts don't make {groups} equal groups of two or more")
    if not 1 <= chosen <= chosen_groups * (experts // groups) or chosen_groups > groups:
        raise ValueError(
            f"{chosen} experts can't come from {chosen_groups} of {groups} groups of"
            f" {experts // groups}"
        )
