"""Integer weights against exact powers, and their sums against Python's."""

import math
from typing import Any

import pytest
import torch

BITS = 36


def weigh(backend: Any, logits: torch.Tensor, temperature: list[float], min_p: list[float]) -> Any:
    best = logits.max(dim=1).values
    numbers = [torch.tensor(one, dtype=torch.float64) for one in (temperature, min_p)]
    inputs = (one.to(backend.device) for one in (logits, best, *numbers))
    weights, sums = backend.op("token_weights")(*inputs, BITS)
    assert weights.dtype == sums.dtype == torch.int64
    return weights.cpu(), sums.cpu()


@pytest.mark.parametrize("width", [1, 127, 128, 129, 1000, 1024, 1025, 3001])
def test_weights_are_rounded_probabilities_and_sums_are_theirs(backend: Any, width: int) -> None:
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(width)) * 4
    temperature, min_p = [0.3, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.2]
    weights, sums = weigh(backend, logits, temperature, min_p)
    for row in range(4):
        best = float(logits[row].max())
        for token, weight in enumerate(weights[row].tolist()):
            share = math.exp((float(logits[row, token]) - best) / temperature[row])
            want = 2**BITS * share if share >= min_p[row] else 0.0
            assert abs(weight - want) <= 0.5 + 1e-3
        parts = weights[row].split(128)
        assert sums[row].tolist() == [sum(part.tolist()) for part in parts]


def test_the_best_weighs_a_power_of_two_and_minus_infinity_nothing(backend: Any) -> None:
    logits = torch.full((3, 200), -math.inf)
    logits[0, 5] = 1e-30
    logits[1, [0, 199]] = -3e38
    logits[2] = 3e38
    logits[2, 7] = -3e38
    weights, _ = weigh(backend, logits, [1.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert weights[0].tolist() == [2**BITS * (token == 5) for token in range(200)]
    assert weights[1].tolist() == [2**BITS * (token in (0, 199)) for token in range(200)]
    assert weights[2].tolist() == [2**BITS * (token != 7) for token in range(200)]


def test_wrong_arguments_are_refused(backend: Any) -> None:
    logits = torch.zeros(2, 9, device=backend.device)
    row = torch.ones(2, device=backend.device)
    with pytest.raises(ValueError, match="temperature must be torch"):
        backend.op("token_weights")(logits, row, row, row.double(), BITS)
    with pytest.raises(ValueError, match="logits must be contiguous"):
        backend.op("token_weights")(logits[:, ::2], row, row.double(), row.double(), BITS)
