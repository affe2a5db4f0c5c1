"""Exact top-k with canonical ties, against Python's own sort, on hostile distributions."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from echokv.kernels.reference.name_rows import name_rows

INF = math.inf


def oracle(scores: list[float], k: int) -> tuple[list[int], float]:
    """Sort (score descending, position ascending), take k, report positions ascending."""
    ranked = [-INF if math.isnan(s) else s for s in scores]
    order = sorted(range(len(ranked)), key=lambda i: (-ranked[i], i))[:k]
    kth = ranked[order[-1]] if len(order) == k else -INF
    return sorted(order) + [-1] * (k - len(order)), kth


def check(backend: Any, scores: torch.Tensor, lens: list[int], k: int) -> None:
    """The op on these rows equals the oracle."""
    context_lens = torch.tensor(lens, dtype=torch.int32, device=backend.device)
    positions, kth = backend.op("topk")(scores.to(backend.device), context_lens, k)
    assert positions.shape == (len(lens), k) and positions.dtype == torch.int32
    assert kth.shape == (len(lens),) and kth.dtype == torch.float32
    for row, length in enumerate(lens):
        want, want_kth = oracle(scores[row, :length].tolist(), k)
        assert positions[row].tolist() == want, f"row {row} of length {length}"
        assert kth[row].item() == want_kth
        assert kth[row].item() != 0 or not torch.signbit(kth[row]), "-0.0 must come back as 0.0"


def bits(pattern: torch.Tensor) -> torch.Tensor:
    """int32 bit patterns as floats."""
    return pattern.to(torch.int32).view(torch.float32)


DISTRIBUTIONS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": torch.randn,
    "all equal": lambda n: torch.full((n,), 1.5),
    "relu zeros, a few positive": lambda n: (torch.randn(n) - 1.5).clamp(min=0),
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, -0.0, 0.0),
    "signed zeros among others": lambda n: torch.randn(n).round() * 0.0 + torch.randn(n).trunc(),
    "four values": lambda n: torch.randint(-2, 2, (n,)).float(),
    "ascending": lambda n: torch.arange(n).float() - n / 2,
    "descending": lambda n: n / 2 - torch.arange(n).float(),
    "same upper 24 bits": lambda n: bits(0x3FC00000 + torch.randint(0, 256, (n,))),
    "same lower 24 bits": lambda n: bits((torch.randint(0, 127, (n,)) << 24) | 0x123456),
    "negative, same upper bits": lambda n: -bits(0x3FC00000 + torch.randint(0, 512, (n,))),
    "subnormal": lambda n: bits(torch.randint(0, 4096, (n,))) * torch.sign(torch.randn(n)),
    "huge and infinite": lambda n: torch.where(torch.rand(n) < 0.3, INF, torch.randn(n) * 1e38),
    "minus infinity inside": lambda n: torch.where(torch.rand(n) < 0.6, -INF, torch.randn(n)),
    "nan inside": lambda n: torch.where(torch.rand(n) < 0.6, math.nan, torch.randn(n)),
    "one large at the end": lambda n: torch.arange(n).eq(n - 1).float(),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_topk_equals_sorting(backend: Any, name: str) -> None:
    """Lengths around k and around the 64-token block, in one pass; NaN past every length."""
    k, width = 64, 320
    lens = [0, 1, k - 1, k, k + 1, 127, 128, 300, 320]
    scores = torch.stack([DISTRIBUTIONS[name](width) for _ in lens])
    for row, length in enumerate(lens):
        scores[row, length:] = math.nan if row % 2 else INF
    check(backend, scores, lens, k)


@pytest.mark.parametrize("k", [1, 63, 65, 1000])
def test_topk_of_any_k(backend: Any, k: int) -> None:
    """k larger than the width, and not a power of two."""
    lens = [640, 63, 65, 0]
    check(backend, torch.randn(4, 640).round(decimals=1), lens, k)


@pytest.mark.parametrize("name", ["normal", "four values", "same upper 24 bits"])
def test_topk_over_several_pieces_of_a_row(backend: Any, name: str) -> None:
    """Rows longer than what one program looks at; ties cross the pieces."""
    width, k = 10_000, 2048
    lens = [10_000, 8_193, 4_097, 2_047]
    check(backend, torch.stack([DISTRIBUTIONS[name](width) for _ in lens]), lens, k)


def test_topk_of_a_length_beyond_the_width(backend: Any) -> None:
    scores = torch.randn(2, 70)
    for k in (64, 70, 80):
        lens = torch.tensor([71, 1000], dtype=torch.int32, device=backend.device)
        positions, kth = backend.op("topk")(scores.to(backend.device), lens, k)
        for row in range(2):
            want, want_kth = oracle(scores[row].tolist(), k)
            assert positions[row].tolist() == want and kth[row].item() == want_kth


def test_topk_does_not_depend_on_the_neighbours(backend: Any) -> None:
    scores = torch.randint(0, 50, (5, 256)).float().to(backend.device)
    lens = torch.tensor([256, 100, 3, 0, 200], dtype=torch.int32, device=backend.device)
    positions, kth = backend.op("topk")(scores, lens, 64)
    for row in range(5):
        length = int(lens[row])
        width = max(64, length)
        alone = backend.op("topk")(scores[row : row + 1, :width].contiguous(), lens[[row]], 64)
        assert torch.equal(alone[0][0], positions[row]) and torch.equal(alone[1][0], kth[row])


@pytest.mark.parametrize("name", ["normal", "all equal", "same upper 24 bits"])
def test_topk_of_a_million_tokens(backend: Any, name: str) -> None:
    """A fixed-size candidate list would overflow here (seen in public kernels)."""
    if backend.interpreted:
        pytest.skip("too slow under the interpreter; the million runs on a GPU")
    scores = torch.stack([DISTRIBUTIONS[name](1_000_003) for _ in range(2)])
    check(backend, scores, [1_000_003, 999_999], 2048)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("width, k", [(320, 64), (9000, 2048)])
def test_rows_are_selected_and_named_at_once(backend: Any, name: str, width: int, k: int) -> None:
    """As one after the other, to the bit; NaN and zeros of both signs included."""
    if backend.interpreted and width > 320 and name != "normal":
        pytest.skip("too slow under the interpreter")
    lens = [0, 1, k - 1, k, k + 1, width - 63, width]
    scores = torch.stack([DISTRIBUTIONS[name](width) for _ in lens])
    blocks = width // 64 + 1
    tables = torch.randperm(4 * blocks).to(torch.int32).view(4, blocks)
    owners = torch.tensor([0, 3, 1, 1, 0, 2, 3], dtype=torch.int32)
    arguments = [t.to(backend.device) for t in (scores, torch.tensor(lens).int(), owners, tables)]
    positions, kth, slots, chosen = backend.op("topk_rows")(*arguments[:2], k, *arguments[2:])
    check(backend, scores, lens, k)
    want = backend.op("topk")(*arguments[:2], k)
    assert torch.equal(positions, want[0]) and torch.equal(kth, want[1])
    named = name_rows(positions.cpu(), scores, owners, tables)
    for got, names in zip((slots, chosen), named, strict=True):
        assert torch.equal(got.cpu().view(torch.int32), names.view(torch.int32))


def test_topk_refuses_what_does_not_fit(backend: Any) -> None:
    scores = torch.zeros(2, 64, device=backend.device)
    lens = torch.ones(2, dtype=torch.int32, device=backend.device)
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        backend.op("topk")(scores, lens, 0)
    with pytest.raises(ValueError, match=r"context_lens must be torch.int32, got torch.int64"):
        backend.op("topk")(scores, lens.long(), 4)
