"""The CUDA indexer scores on the GPU, against fp64 over the same pages."""

import random

import pytest
import torch
from tests.kernels.conftest import HAS_HOPPER, Backend
from tests.kernels.test_index_scores import Case

from echokv.kernels.cuda import index_scores as cuda
from echokv.kernels.reference.index_keys import (
    page_scales,
    page_values,
    quantise_ue8m0,
    rotate,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU"),
]
ON_GPU = Backend("cuda", torch.device("cuda"))
AWKWARD = [1, 63, 64, 65, 2047, 2048, 2049, 0, 0, 4161, 255, 256, 257]


def plain(case: Case, row: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's scores in plain PyTorch from the bytes that are stored; and the terms' sizes."""
    length = int(case.lens[row])
    ids = case.tables[int(case.request_rows[row]), : -(-length // 64)].long()
    pages = case.pages[ids.cuda()].cpu()
    keys = page_values(pages, case.fmt).to(dtype).flatten(0, 1)[:length]
    scales = page_scales(pages, case.fmt).to(dtype).flatten()[:length]
    codes, factors = quantise_ue8m0(rotate(case.query[row]))
    dots = torch.relu(codes.to(dtype) @ keys.T)
    weights = (case.weights[row] * 128**-0.5 * factors).to(dtype)
    return weights @ dots * scales, weights.abs() @ dots * scales


def check(case: Case) -> None:
    """Off by at most twice what bf16 in PyTorch is plus rounding, and by 2^-11 of the terms."""
    case.query = torch.randn(case.query.shape).to(case.query.dtype)
    ours = case.run(ON_GPU)
    errors, rounded = [0.0], [0.0]
    for row, length in enumerate(case.lens.tolist()):
        assert (ours[row, length:] == -torch.inf).all(), f"row {row} past {length}"
        if length:
            exact, size = plain(case, row, torch.float64)
            most = size.max()
            errors.append(float((ours[row, :length] - exact).abs().max() / most))
            rounded.append(float((plain(case, row, torch.bfloat16)[0] - exact).abs().max() / most))
    assert max(errors) <= min(2 * max(rounded) + 2**-13, 2**-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [32, 64])
def test_scores_of_awkward_lengths(heads: int, dtype: torch.dtype) -> None:
    rows = [(request, length) for request, length in enumerate(AWKWARD)]
    check(Case(ON_GPU, "fp8", heads, 128, rows, dtype))


@pytest.mark.parametrize("heads", [32, 64])
def test_scores_of_many_rows(heads: int) -> None:
    """Short rows, so that a block has more of them than it has stages; some share a request."""
    rng = random.Random(heads)
    rows = [(row // 3, rng.choice([0, 1, 5, 64, 130, 700])) for row in range(700)]
    check(Case(ON_GPU, "fp8", heads, 128, rows, torch.bfloat16))


CHUNKS = [(9, 9), (200, 5), (65, 1), (0, 3), (300, 300), (4000, 50), (129, 20), (10, 1)]
"""(context, queries) of requests in one pass."""


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("chunks", [CHUNKS, [(9, 9)], [(5000, 700)], [(700, 1)] * 13])
def test_tiles_give_the_same_bits(
    heads: int, chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that share keys, scored together and row by row."""
    rows = [
        (request, max(0, context - queries + 1 + query))
        for request, (context, queries) in enumerate(chunks)
        for query in range(queries)
    ]
    case = Case(ON_GPU, "fp8", heads, 128, rows, torch.bfloat16)
    monkeypatch.setattr(cuda, "TILED_FROM", 0)
    tiled = case.run(ON_GPU)
    assert torch.equal(case.run(ON_GPU), tiled)
    monkeypatch.setattr(cuda, "TILED_FROM", 10**9)
    assert torch.equal(case.run(ON_GPU), tiled)


def test_scores_of_one_long_row_among_padding() -> None:
    check(Case(ON_GPU, "fp8", 64, 128, [(0, 0), (0, 50_001), (0, 0)], torch.bfloat16))


def test_nothing_to_score() -> None:
    case = Case(ON_GPU, "fp8", 64, 128, [(0, 0)] * 5, torch.bfloat16)
    assert (case.run(ON_GPU, longest=64) == -torch.inf).all()


def test_a_rows_bits_do_not_depend_on_the_rest_of_the_pass() -> None:
    rows = [(request, length) for request, length in enumerate(AWKWARD)]
    case = Case(ON_GPU, "fp8", 64, 128, rows, torch.bfloat16)
    together = case.run(ON_GPU)
    for row, length in enumerate(AWKWARD):
        alone = case.run(ON_GPU, [row], longest=max(1, length))
        assert torch.equal(alone[0, :length], together[row, :length]), f"row {row}"


def test_query_bytes_equal_the_references() -> None:
    """Quantised codes and folded weights, bit for bit, in the order of the image."""
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(7, 64, 128).to(dtype)
        query[2] = 0
        query[3] *= 1e-6
        weights = torch.randn(7, 64)
        image = cuda.quantise_query(query.cuda(), weights.cuda()).cpu()
        codes, scales = quantise_ue8m0(rotate(query))
        folded = image[:, 64 * 128 :].contiguous().view(torch.float32)
        assert torch.equal(folded, weights * 128**-0.5 * scales)
        # [heads / 8, chunk of 16, head % 8, column, 4] to [head, half, column, word, 4].
        parts = image[:, : 64 * 128].view(7, 8, 2, 4, 8, 4, 4).permute(0, 1, 4, 2, 5, 3, 6)
        assert torch.equal(parts.reshape(7, 64, 128), codes.view(torch.uint8))


def test_scores_replay_in_a_graph() -> None:
    """Lengths and tables are read when the graph runs."""
    rows = [(request, length) for request, length in enumerate(AWKWARD)]
    case = Case(ON_GPU, "fp8", 64, 128, rows, torch.bfloat16)
    first, longest = case.lens.clone(), int(case.lens.max())
    lens = case.lens.cuda()
    arguments = [case.query.cuda(), case.weights.cuda(), case.pages, case.fmt, case.tables.cuda(),
                 case.request_rows.cuda(), lens]  # fmt: skip
    cuda.index_scores(*arguments, longest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.index_scores(*arguments, longest)
    for shorter in (0, 70, 2000):
        lens.copy_((first - shorter).clamp(min=0))
        graph.replay()
        assert torch.equal(out, cuda.index_scores(*arguments, longest))
