"""The indexer's top-k against brute force in float64 over an explicit list of keys."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.indexer import indexer as indexer_module
from echokv.indexer.indexer import Indexer, Selection, rows_per_score_piece
from echokv.kernels.registry import load_kernels
from echokv.memory.formats import IndexKeyFormat
from echokv.memory.slots import BLOCK_TOKENS, HostSlots

CPU = torch.device("cpu")
HEADS, DIM, TOPK, LAYERS, PAGES = 8, 64, 16, 2, 12
KERNELS = load_kernels("reference", CPU)


@dataclass
class World:
    """Two requests of some length, all of whose keys are stored, and a batch of their last rows."""

    indexer: Indexer
    keys: list[Tensor]  # [length, D] a request
    batch: ForwardBatch
    query: Tensor
    weights: Tensor


def build(lengths: tuple[int, int], rows: tuple[int, int], fmt: str = "float32") -> World:
    """Blocks are shuffled, pages poisoned; two padding rows close the batch."""
    generator = torch.Generator().manual_seed(sum(lengths))
    key_fmt = IndexKeyFormat(name=fmt, head_dim=DIM)
    pages = torch.full((LAYERS, PAGES, key_fmt.page_bytes), 0xFF, dtype=torch.uint8)
    indexer = Indexer(KERNELS, pages, key_fmt, TOPK)
    tables = torch.randperm(PAGES, generator=generator).view(2, -1).to(torch.int32)
    keys = [torch.randn(length, DIM, generator=generator) for length in lengths]
    for request, length in enumerate(lengths):
        everything = make_batch(tables, [(request, position) for position in range(length)])
        indexer.append(1, keys[request], everything)
    last = [
        (request, position)
        for request in range(2)
        for position in range(lengths[request] - rows[request], lengths[request])
    ]
    batch = make_batch(tables, last, padding=2)
    query = torch.randn(batch.num_tokens, HEADS, DIM, generator=generator)
    weights = torch.randn(batch.num_tokens, HEADS, generator=generator)
    return World(indexer, keys, batch, query, weights)


def make_batch(tables: Tensor, rows: list[tuple[int, int]], padding: int = 0) -> ForwardBatch:
    requests = torch.tensor([request for request, _ in rows] + [0] * padding, dtype=torch.int32)
    positions = torch.tensor([position for _, position in rows] + [0] * padding, dtype=torch.int32)
    real = torch.arange(len(rows) + padding) < len(rows)
    blocks = tables[requests.long(), positions.long() // BLOCK_TOKENS]
    slots = torch.where(real, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS, -1)
    return ForwardBatch(
        token_ids=torch.zeros(len(real), dtype=torch.int64),
        positions=positions,
        context_lens=torch.where(real, positions + 1, 0).to(torch.int32),
        host_slots=HostSlots(slots.to(torch.int32)),
        request_rows=requests,
        request_slots=None,
        block_tables=tables,
        sampled_rows=torch.zeros(0, dtype=torch.int64),
        max_context_len=max(position + 1 for _, position in rows),
        num_context_rows=sum(position + 1 for _, position in rows),
        num_real_tokens=len(rows),
    )


def true_scores(world: World, row: int) -> Tensor:
    request, length = int(world.batch.request_rows[row]), int(world.batch.context_lens[row])
    keys = world.keys[request][:length].double()
    dots = (world.query[row].double() @ keys.T * DIM**-0.5).relu()  # [H, length]
    return world.weights[row].double() @ dots


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [((1, 2), (1, 1)), ((15, 17), (3, 3)), ((64, 65), (9, 2)), ((333, 90), (4, 8))],
)
def test_selection_is_the_true_top_k(lengths: tuple[int, int], rows: tuple[int, int]) -> None:
    world = build(lengths, rows)
    selection = world.indexer.select(1, world.query, world.weights, world.batch)
    for row in range(world.batch.num_real_tokens):
        truth = true_scores(world, row)
        best = truth.topk(min(TOPK, len(truth))).indices.sort().values
        count = len(best)
        assert selection.positions[row].tolist() == [*best.tolist(), *[-1] * (TOPK - count)]
        torch.testing.assert_close(
            selection.scores[row, :count].double(), truth[best], rtol=1e-5, atol=1e-5
        )
        assert (selection.scores[row, count:] == -torch.inf).all()
        lowest = truth[best].min() if count == TOPK else -torch.inf
        assert selection.kth_scores[row].item() == pytest.approx(float(lowest), rel=1e-5)
        table = world.batch.block_tables[world.batch.request_rows[row]]
        slots = table[best // BLOCK_TOKENS] * BLOCK_TOKENS + best % BLOCK_TOKENS
        assert selection.host_slots[row].tolist() == [*slots.tolist(), *[-1] * (TOPK - count)]
    assert selection.positions.dtype == selection.host_slots.dtype == torch.int32
    check_padding(selection, world.batch)


def check_padding(selection: Selection, batch: ForwardBatch) -> None:
    past = slice(batch.num_real_tokens, None)
    assert (selection.positions[past] == -1).all()
    assert (selection.host_slots[past] == -1).all()
    assert (selection.scores[past] == -torch.inf).all()
    assert (selection.kth_scores[past] == -torch.inf).all()


@pytest.mark.parametrize("rows_a_piece", [1, 2, 5])
def test_scoring_in_pieces_changes_no_bit(
    rows_a_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = build((130, 77), (6, 7))
    whole = world.indexer.select(1, world.query, world.weights, world.batch)
    piece_bytes = 4 * 192 * rows_a_piece
    monkeypatch.setattr(indexer_module, "MAX_SCORE_BYTES", piece_bytes)
    assert rows_per_score_piece(130) == rows_a_piece
    pieces = world.indexer.select(1, world.query, world.weights, world.batch)
    for name in ("positions", "host_slots", "scores", "kth_scores"):
        assert torch.equal(getattr(pieces, name), getattr(whole, name))


def test_layers_do_not_mix() -> None:
    world = build((40, 40), (1, 1))
    before = world.indexer.select(1, world.query, world.weights, world.batch)
    world.indexer.append(0, torch.randn(4, DIM), world.batch)
    after = world.indexer.select(1, world.query, world.weights, world.batch)
    assert torch.equal(before.scores, after.scores)


def test_padding_writes_nothing() -> None:
    world = build((3, 3), (1, 1))
    batch = replace(world.batch, host_slots=HostSlots(torch.full_like(world.batch.host_slots, -1)))
    before = world.indexer.select(1, world.query, world.weights, world.batch)
    world.indexer.append(1, torch.full((4, DIM), torch.nan), batch)
    after = world.indexer.select(1, world.query, world.weights, world.batch)
    assert torch.equal(before.scores, after.scores)


@pytest.mark.parametrize(("fmt", "tolerance"), [("bfloat16", 0.01), ("fp8", 0.06)])
def test_quantised_selections_differ_only_near_the_kth_score(fmt: str, tolerance: float) -> None:
    """Scores are off by rounding alone, and only tokens within that of the k-th change sides."""
    world = build((333, 90), (24, 24), fmt)
    selection = world.indexer.select(1, world.query, world.weights, world.batch)
    squared = torch.zeros(2, dtype=torch.float64)
    flips = 0
    for row in range(world.batch.num_real_tokens):
        truth = true_scores(world, row)
        chosen = selection.positions[row].long()
        error = selection.scores[row].double() - truth[chosen]
        squared += torch.stack((error.square().sum(), truth.square().mean() * len(chosen)))
        best = truth.topk(TOPK)
        band = 0.25 * truth.std()
        changed = set(chosen.tolist()) ^ set(best.indices.tolist())
        flips += len(changed) // 2
        assert all((truth[p] - best.values[-1]).abs() < band for p in changed)
    relative = (squared[0] / squared[1]).sqrt()
    assert 1e-4 < relative < tolerance
    assert flips < 0.1 * TOPK * world.batch.num_real_tokens
