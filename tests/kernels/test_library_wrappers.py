"""What stands between our ops and the libraries, with the libraries' conventions checked."""

from typing import Any

import pytest
import torch
from tests.kernels import fake_libraries
from tests.kernels.conftest import HAS_CUDA, Backend
from tests.kernels.test_fp8_experts import Case as ExpertsCase
from tests.kernels.test_fp8_linear import activations, fp8_weight
from tests.kernels.test_sparse_mla import Case as MlaCase
from torch import Tensor

from echokv.kernels.deepgemm import fp8_experts as experts_module
from echokv.kernels.deepgemm import fp8_linear as linear_module
from echokv.kernels.deepgemm import index_scores as scores_module
from echokv.kernels.deepgemm.index_scores import DeepGemmScores
from echokv.kernels.flashmla import sparse_mla as mla_module
from echokv.kernels.flashmla.sparse_mla import FlashMla
from echokv.kernels.reference import fp8_linear as reference
from echokv.kernels.reference.fp8_experts import fp8_experts as reference_experts
from echokv.kernels.reference.index_keys import write_index_keys
from echokv.kernels.reference.index_scores import index_scores
from echokv.kernels.reference.sparse_mla import sparse_mla
from echokv.memory.formats import IndexKeyFormat

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(HAS_CUDA, reason="the real libraries are tested where they run")


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experts_module, linear_module, scores_module):
        monkeypatch.setattr(module, "load_deep_gemm", lambda: fake_libraries.DEEP_GEMM)
    monkeypatch.setattr(mla_module, "load_flash_mla", lambda: fake_libraries.FLASH_MLA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.parametrize("rows", [0, 1, 15])
def test_products(rows: int) -> None:
    x = activations(CPU, rows, 256)
    weight, scale = fp8_weight(CPU, 512, 256)
    expected = reference.fp8_linear(x, weight, scale)
    torch.testing.assert_close(linear_module.fp8_linear(x, weight, scale), expected)
    gated = linear_module.fp8_gate_up(x, weight, scale)
    torch.testing.assert_close(
        gated.float(), reference.fp8_gate_up(x, weight, scale).float(), rtol=0.02, atol=1e-4
    )


@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
def test_experts_in_both_layouts(tokens: int) -> None:
    case = ExpertsCase(CPU, tokens)
    arguments = (case.x, case.experts, case.weights, *case.gate_up, *case.down)
    expected = reference_experts(*arguments)
    got = experts_module.fp8_experts(*arguments)
    assert got.shape == expected.shape and got.dtype == torch.float32
    assert tokens == 0 or (got - expected).norm() <= 0.02 * expected.norm()


def test_scores_use_one_schedule_for_all_layers() -> None:
    fmt = IndexKeyFormat(name="fp8", head_dim=128)
    lens = torch.tensor([130, 0, 64], dtype=torch.int32)
    tables = torch.tensor([[4, 1, 2], [3, -1, -1]], dtype=torch.int32)
    requests = torch.tensor([0, 0, 1], dtype=torch.int32)
    library = DeepGemmScores()
    schedule = library.schedule(tables, requests, lens, 130)
    for _ in range(2):  # two layers
        pages = torch.full((6, fmt.page_bytes), 0xFF, dtype=torch.uint8)
        slots = torch.tensor([[block * 64 + i for i in range(64)] for block in (4, 1, 2, 3)])
        write_index_keys(torch.randn(256, 128), slots.flatten().to(torch.int32), pages, fmt)
        query, weights = torch.randn(3, 32, 128).bfloat16(), torch.randn(3, 32)
        scores = library.index_scores(query, weights, pages, fmt, schedule)
        assert scores.shape == (3, 256) and scores.is_contiguous()
        expected = index_scores(query, weights, pages, fmt, tables, requests, lens, 130)
        for row, length in enumerate(lens.tolist()):
            torch.testing.assert_close(scores[row, :length], expected[row, :length])


@pytest.mark.parametrize("heads", [3, 64])
@pytest.mark.parametrize("tokens", [0, 3, 300])
def test_attention_pads_heads_and_selections(heads: int, tokens: int) -> None:
    case = MlaCase(
        Backend("reference", CPU), "fp8_ds_mla", [5, 0, 3] * (tokens // 3) or [1], k=5,
        heads=heads, latent_dim=512, rope_dim=64, dtype=torch.bfloat16,
    )  # fmt: skip
    query, slots = case.query[:tokens].contiguous(), case.slots[:tokens].contiguous()
    library = FlashMla()
    for _ in range(2):  # the schedule is made once
        out = library.decode(query, case.pool, slots, case.fmt, 0.1)
        # Padding changes the shape of the fake's product, and so its rounding.
        torch.testing.assert_close(out, sparse_mla(query, case.pool, slots, case.fmt, 0.1))
    assert out.is_contiguous()


@pytest.mark.parametrize(("first", "tokens"), [(0, 128), (0, 5), (60, 70), (64, 64), (127, 1)])
def test_a_prefill_gives_every_token_the_place_of_its_row(first: int, tokens: int) -> None:
    counts = [1 + row % 5 for row in range(tokens)]
    case = MlaCase(
        Backend("reference", CPU), "fp8_ds_mla", counts, k=64, heads=64, latent_dim=512,
        rope_dim=64, dtype=torch.bfloat16,
    )  # fmt: skip
    calls: list[tuple[int, list[int]]] = []
    library = FlashMla()
    attend = library._attend

    def noting(query: Tensor, rows: Tensor, slots: Tensor, *args: Any) -> Tensor:
        calls.append((len(query), (slots >= 0).sum(1).tolist()))
        return attend(query, rows, slots, *args)

    library._attend = noting  # type: ignore[method-assign]
    out = library.prefill(case.query, case.pool, case.slots, case.fmt, 0.1, first_row=first)
    torch.testing.assert_close(out, sparse_mla(case.query, case.pool, case.slots, case.fmt, 0.1))
    assert {size for size, _ in calls} == {64}
    places = [count for _, selected in calls for count in selected]
    assert places[first % 64 : first % 64 + tokens] == counts and sum(places) == sum(counts)


def test_a_schedule_must_be_made_before_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    case = MlaCase(
        Backend("reference", CPU), "fp8_ds_mla", [5], k=64, heads=64, latent_dim=512,
        rope_dim=64, dtype=torch.bfloat16,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(AssertionError, match=r"for \(1, 64, 64\) must be made before a graph"):
        FlashMla().decode(case.query, case.pool, case.slots, case.fmt, 0.1)
