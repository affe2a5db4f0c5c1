"""Probabilities as integers, to draw a token from sums that are exact in any order."""

import torch
from torch import Tensor

from echokv.kernels.checks import check_tensor

GROUP = 128
"""Tokens whose weights are also summed up."""

LOWEST_TEMPERATURE = 1e-6
"""Below it, 0 included, a temperature counts as this."""


def token_weights(
    logits: Tensor, best: Tensor, temperature: Tensor, min_p: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """What each token weighs beside one of logit `best`, which weighs 2 ** bits.

    exp((logit - best) / temperature), in float64, scaled and rounded half up; 0 below min_p.

    Args:
        logits: [S, W] float32, at most `best`; -inf weighs nothing.
        best: [S] float32.
        temperature: [S] float64.
        min_p: [S] float64 in [0, 1].
        bits: such that W << bits fits 53 bits: then every sum of weights is an exact float64.

    Returns:
        [S, W] int64 weights, and [S, ceil(W / GROUP)] int64 their sums over GROUP tokens.
    """
    check_token_weights(logits, best, temperature, min_p)
    distance = logits.double() - best.double().unsqueeze(1)
    shares = (distance / temperature.clamp(min=LOWEST_TEMPERATURE).unsqueeze(1)).exp()
    weights = (shares * 2.0**bits + 0.5).floor()
    weights = torch.where(shares < min_p.unsqueeze(1), 0.0, weights).long()
    return weights, group_sums(weights)


def group_sums(weights: Tensor) -> Tensor:
    """[S, W] int64 to [S, ceil(W / GROUP)]."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % GROUP))
    return padded.view(weights.shape[0], -1, GROUP).sum(dim=-1)


def check_token_weights(logits: Tensor, best: Tensor, temperature: Tensor, min_p: Tensor) -> None:
    """Raise ValueError unless `token_weights` can take these."""
    check_tensor("logits", logits, (None, None), torch.float32)
    rows = (logits.shape[0],)
    check_tensor("best", best, rows, torch.float32, device=logits.device)
    check_tensor("temperature", temperature, rows, torch.float64, device=logits.device)
    check_tensor("min_p", min_p, rows, torch.float64, device=logits.device)
