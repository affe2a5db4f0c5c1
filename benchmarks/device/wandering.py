"""Queries whose selections move on from step to step, and how far until so much is missing.

Knows directions in the space of index keys, and nothing of engines. Keys are random; a query is a
direction too, that turns by a small angle a step. Sometimes it strays: a step's query has a large
part of its own, and the next goes on as if nothing had been. So most rows come back that are
dropped, those next to the k-th score are missing most often, and some at the best ranks are
missing too, as in traces of the demo model (`recorded.ABSENT`).
"""

import math

import torch
from torch import Tensor

STRAYS = 0.1
"""Share of the steps whose query strays."""

STRAY_PART = 0.3
"""Of such a query, squared, what is its own."""

POOL = 4
"""Selections of a request that a device pool holds."""

_TOPK, _REQUESTS, _STEPS, _COUNTED = 256, 16, 110, 40
"""Of the miniature by which angles are found: a pool is full after 70 steps."""


def directions(
    steps: int, requests: int, dim: int, angle: float, generator: torch.Generator
) -> Tensor:
    """[steps, requests, dim] float32 queries of length one.

    Args:
        steps: how many.
        requests: each with a way of its own.
        dim: of a key.
        angle: radians a step.
        generator: on the device where they are to be.
    """

    def drawn() -> Tensor:
        noise = torch.randn(requests, dim, generator=generator, device=generator.device)
        return torch.nn.functional.normalize(noise, dim=1)

    found, way = [], drawn()
    for _ in range(steps):
        way = torch.nn.functional.normalize(math.cos(angle) * way + math.sin(angle) * drawn())
        strays = torch.rand(requests, 1, generator=generator, device=generator.device) < STRAYS
        own = torch.where(strays, STRAY_PART, 0.0)
        found.append(torch.nn.functional.normalize((1 - own).sqrt() * way + own.sqrt() * drawn()))
    return torch.stack(found)


def angle_for(hit_rate: float, topk: int, context: int, dim: int, device: torch.device) -> float:
    """Radians a step by which a pool of POOL selections a request has this hit rate.

    Found by halving, in a miniature of the same number of tokens for each that is selected.

    Args:
        hit_rate: share of the selected rows that are in the pool already, after many steps.
        topk: entries of a selection.
        context: tokens of a request.
        dim: of a key.
        device: where the miniature runs.
    """
    low, high = 0.0, 1.5
    for _ in range(12):
        middle = (low + high) / 2
        if hits(middle, topk, context, dim, device)[0] > hit_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def hits(
    angle: float, topk: int, context: int, dim: int, device: torch.device
) -> tuple[float, list[float]]:
    """Hit rate of a miniature, and the share that is absent of each eighth of k, to rank 4k."""
    small = min(topk, _TOPK)
    tokens = max(round(context * small / topk), 1)
    generator = torch.Generator(device).manual_seed(7)
    keys = torch.randn(tokens, dim, generator=generator, device=device)
    ways = directions(_STEPS, _REQUESTS, dim, angle, generator)
    seen = torch.full((_REQUESTS, tokens), -1.0, device=device)  # the step that selected last
    ranks = min(4 * small, tokens)
    absent = torch.zeros(ranks, device=device)
    for step, query in enumerate(ways):
        order = (query @ keys.T).topk(ranks, dim=1).indices
        if step >= _STEPS - _COUNTED:
            oldest = seen.topk(min(POOL * small, tokens), dim=1).values[:, -1:]
            missing = (seen < oldest) | (seen < 0)
            absent += missing.gather(1, order).float().mean(dim=0)
        seen.scatter_(1, order[:, :small], float(step))
    absent /= _COUNTED
    eighths = [float(part.mean()) for part in absent.split(max(small // 8, 1))]
    return 1 - float(absent[:small].mean()), eighths
