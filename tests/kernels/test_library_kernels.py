"""FlashMLA and DeepGEMM behind the ops' contracts, on a Hopper GPU where they are installed."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.conftest import HAS_HOPPER, Backend
from tests.kernels.test_fp8_experts import Case as ExpertsCase
from tests.kernels.test_fp8_linear import (
    activations,
    assert_close,
    exact_activations,
    exact_weight,
    fp8_weight,
)
from tests.kernels.test_sparse_mla import Case as MlaCase
from torch import Tensor
from torch.nn import functional

from echokv.kernels.libraries import library_problem, load_deep_gemm, load_flash_mla
from echokv.kernels.reference.index_keys import write_index_keys
from echokv.kernels.reference.index_scores import index_scores
from echokv.memory.formats import IndexKeyFormat

CUDA = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")]


def needs(load: Callable[[], Any]) -> Any:
    problem = library_problem(load) if HAS_HOPPER else "no Hopper GPU"
    return pytest.mark.skipif(problem is not None, reason=problem or "")


def captured(function: Callable[[], Tensor]) -> Tensor:
    """The result of a graph's second replay; the function has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    out.fill_(float("nan"))
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return out


@needs(load_flash_mla)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("counts, k", [([70], 70), ([0, 1, 64, 200], 256), ([128] * 13, 128)])
def test_flashmla_attends_as_the_dense_one(heads: int, counts: list[int], k: int) -> None:
    from echokv.kernels.flashmla.sparse_mla import FlashMla

    case = MlaCase(
        Backend("triton", CUDA), "fp8_ds_mla", counts, k=k, heads=heads, latent_dim=512,
        rope_dim=64, dtype=torch.bfloat16,
    )  # fmt: skip
    library = FlashMla()

    def run() -> Tensor:
        return library.decode(case.query, case.pool, case.slots, case.fmt, 0.1352)

    out = run()
    assert out.shape == (len(counts), heads, 512) and out.dtype == torch.bfloat16
    for token, count in enumerate(counts):
        if count == 0:
            assert (out[token] == 0).all()
            continue
        exact, plain = case.dense(token, torch.float64), case.dense(token, torch.bfloat16)
        rounding = 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
        allowed = 2 * (plain.double() - exact).abs().max() + rounding
        assert (out[token].cpu().double() - exact).abs().max() <= allowed
    assert torch.equal(captured(run), out)


@needs(load_flash_mla)
def test_flashmla_gives_a_row_of_a_prefill_the_same_bits_in_any_piece() -> None:
    from echokv.kernels.flashmla.sparse_mla import FlashMla

    counts = [(37 * row) % 200 for row in range(150)]
    case = MlaCase(
        Backend("triton", CUDA), "fp8_ds_mla", counts, k=256, heads=128, latent_dim=512,
        rope_dim=64, dtype=torch.bfloat16,
    )  # fmt: skip
    library = FlashMla()

    def run(rows: slice) -> Tensor:
        return library.prefill(
            case.query[rows], case.pool, case.slots[rows], case.fmt, 0.1352, first_row=rows.start
        )

    whole = run(slice(0, 150))
    for cuts in ([0, 1, 2, 63, 64, 130, 150], [0, 24, 48, 72, 96, 120, 144, 150], [0, 64, 150]):
        parts = [run(slice(start, stop)) for start, stop in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
    for token in (1, 70, 149):
        exact, plain = case.dense(token, torch.float64), case.dense(token, torch.bfloat16)
        rounding = 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
        allowed = 2 * (plain.double() - exact).abs().max() + rounding
        assert (whole[token].cpu().double() - exact).abs().max() <= allowed


@needs(load_deep_gemm)
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("lens", [[1], [63, 64, 65], [300, 0, 1000, 5]])
def test_deepgemm_scores_within_each_context(heads: int, lens: list[int]) -> None:
    from echokv.kernels.deepgemm.index_scores import DeepGemmScores

    fmt = IndexKeyFormat(name="fp8", head_dim=128)
    blocks = [-(-length // 64) for length in lens]
    pages = torch.full((sum(blocks) + 2, fmt.page_bytes), 0xFF, dtype=torch.uint8)
    order = torch.randperm(pages.shape[0])
    tables = torch.full((len(lens), max(blocks) + 1), -1, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lens, blocks, strict=True)):
        tables[row, :count] = order[sum(blocks[:row]) :][:count].to(torch.int32)
        position = torch.arange(length)
        slots = tables[row].long()[position // 64] * 64 + position % 64
        write_index_keys(torch.randn(length, 128), slots.to(torch.int32), pages, fmt)
    rows = torch.tensor([row for row in range(len(lens)) for _ in range(2)], dtype=torch.int32)
    context = torch.tensor([max(0, lens[row] - 1 + i % 2) for i, row in enumerate(rows.tolist())])
    context = context.to(torch.int32)
    query = torch.randn(len(rows), heads, 128).bfloat16()
    weights = torch.randn(len(rows), heads)
    expected = index_scores(query, weights, pages, fmt, tables, rows, context, max(lens))
    library = DeepGemmScores()
    moved = [part.to(CUDA) for part in (query, weights, pages, tables, rows, context)]

    def run() -> Tensor:
        schedule = library.schedule(*moved[3:], max(lens))
        return library.index_scores(*moved[:3], fmt, schedule)

    scores = run()
    size = expected.masked_fill(expected == -torch.inf, 0).abs().max()
    for row, length in enumerate(context.tolist()):
        error = (scores[row, :length].cpu() - expected[row, :length]).abs()
        assert length == 0 or error.max() <= 2**-9 * size
    again = captured(run)
    for row, length in enumerate(context.tolist()):
        assert torch.equal(again[row, :length], scores[row, :length])


@needs(load_deep_gemm)
@pytest.mark.parametrize("rows", [1, 15, 130])
def test_deepgemm_products(rows: int) -> None:
    from echokv.kernels.deepgemm.fp8_linear import fp8_gate_up, fp8_linear

    x = activations(CUDA, rows, 256)
    weight, scale = fp8_weight(CUDA, 512, 256)
    values, matrix = exact_activations(x), exact_weight(weight, scale)
    exact = functional.linear(values, matrix)
    plain = functional.linear(values.bfloat16(), matrix.bfloat16())
    out = fp8_linear(x, weight, scale)
    assert_close(out, exact, plain)
    assert torch.equal(captured(lambda: fp8_linear(x, weight, scale)), out)
    gated = [functional.silu(one[:, :256]) * one[:, 256:] for one in (exact, plain)]
    assert_close(fp8_gate_up(x, weight, scale), *gated)


@needs(load_deep_gemm)
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_deepgemm_experts(tokens: int) -> None:
    from echokv.kernels.deepgemm.fp8_experts import fp8_experts

    case = ExpertsCase(CUDA, tokens)

    def run() -> Tensor:
        return fp8_experts(case.x, case.experts, case.weights, *case.gate_up, *case.down)

    out = run()
    assert_close(out, case.dense(torch.float64), case.dense(torch.bfloat16))
    assert torch.equal(captured(run), out)
