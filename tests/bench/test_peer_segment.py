"""The segment beside SGLang's: equal conditions on both sides, and the whole of a small run.

SGLang's kernels are replaced by plain Python that keeps to what theirs do; the rest is the
benchmark's own code on the reference backend.
"""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE_SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "device"
TOPK, HOT, LAYERS, BATCH, CONTEXT = 32, 128, 2, 3, 512


@pytest.fixture(scope="module")
def scripts() -> Iterator[ModuleType]:
    """Imports of benchmarks/device, whose modules have short names, for this file's tests only."""
    known = set(sys.modules)
    sys.path.insert(0, str(DEVICE_SCRIPTS))
    import peer_segment

    yield peer_segment
    sys.path.remove(str(DEVICE_SCRIPTS))
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if Path(file).parent == DEVICE_SCRIPTS:
            del sys.modules[name]


@pytest.fixture
def case(scripts: Any) -> Iterator[Any]:
    ahead = scripts.ahead
    sizes = replace(
        ahead.SMALL, layers=LAYERS, topk=TOPK, heads=16, device_slots=BATCH * HOT, batches=(BATCH,),
        contexts=(CONTEXT,),
    )  # fmt: skip
    world = ahead.World(sizes, "reference", "fp8_ds_mla", torch.device("cpu"))
    yield scripts.Case(world, BATCH, CONTEXT)
    world.host.close()


class ReferenceLogits:
    """The reference's scores, of which a few are a little different, as another order of sums."""

    def __init__(self, case: Any) -> None:
        self._case = case

    def __call__(self, layer: int) -> Tensor:
        batch, world = self._case.batch, self._case.world
        scores: Tensor = world.kernels.index_scores(
            self._case.query[layer], self._case.weights[layer], world.plain.pages[layer],
            world.plain._fmt, batch.block_tables, batch.request_rows, batch.context_lens, CONTEXT,
        )  # fmt: skip
        return scores * (1 + 1e-6 * torch.arange(scores.shape[1]) % 3)

    def take(self, case: Any) -> None:
        assert case is self._case


def swap_in(
    picks: Tensor, tokens: Tensor, host_slots: Tensor, places: Tensor, host: Tensor, _v: Tensor,
    rows: Tensor, _w: Tensor, found: Tensor, requests: Tensor, lens: Tensor, order: Tensor,
    *_rest: object,
) -> None:  # fmt: skip
    """HiSparse's: hits stay, misses take the places of who was used longest ago."""
    for row in requests.tolist():
        where = {token: place for place, token in enumerate(tokens[row, :HOT].tolist())}
        wanted = picks[row].tolist()
        assert int(lens[row]) - 1 not in wanted
        leaving = [p for p in order[row].tolist() if int(tokens[row, p]) not in set(wanted)]
        for column, token in enumerate(wanted):
            if token not in where:
                place = leaving.pop(0)
                tokens[row, place] = token
                rows[places[row, place]] = host[host_slots[row, token]]
                where[token] = place
            found[row, column] = places[row, where[token]]


def topk(scores: Tensor, out: Tensor) -> None:
    out.copy_(scores.topk(TOPK, dim=1).indices.flip(1))


def peer_of(scripts: Any, case: Any, swap: Any = swap_in) -> Any:
    cache = scripts.HiSparse(
        swap, case.world.host.rows, case.host_slots, topk=TOPK, hot=HOT, stream=nullcontext
    )
    return scripts.Peer(case, ReferenceLogits(case), topk, cache)


@pytest.mark.parametrize("missing", [0.0, 0.03, 0.1])
def test_both_caches_hold_the_same_rows(scripts: Any, case: Any, missing: float) -> None:
    peer, generator = peer_of(scripts, case), torch.Generator().manual_seed(3)
    case.draw(missing, generator)
    peer.take(generator)
    case.restore("off", None)
    state, cache = case.world.manager.state, peer._cache
    for layer in range(LAYERS):
        ours = set((state.host_to_device[layer] >= 0).nonzero().flatten().tolist())
        theirs = []
        for row in range(BATCH):
            held = cache.tokens[layer, row, :HOT].long()
            assert len(set(held.tolist())) == HOT  # of each request as many, none twice
            assert sorted(cache.order[layer, row].tolist()) == list(range(HOT))
            theirs += case.host_slots[row, held].tolist()
        assert ours == set(theirs)
        selected = case.selection(layer).host_slots.flatten().tolist()
        assert len(set(selected) - ours) == round(missing * BATCH * TOPK)
    case.world.manager.state.check()


def test_who_leaves_first_is_the_same_on_both_sides(scripts: Any, case: Any) -> None:
    peer, generator = peer_of(scripts, case), torch.Generator().manual_seed(3)
    case.draw(0.1, generator)
    peer.take(generator)
    case.restore("off", None)
    state, cache = case.world.manager.state, peer._cache
    for layer in range(LAYERS):
        for row in range(BATCH):
            held = cache.tokens[layer, row, :HOT].long()[cache.order[layer, row].long()]
            slots = state.host_to_device[layer][case.host_slots[row, held]].long()
            priorities = state.priority[layer][slots].tolist()
            assert priorities == sorted(priorities)
            assert max(priorities) < int(state.floor)


def test_near_the_kth_score_more_is_missing(scripts: Any, case: Any) -> None:
    generator, halves = torch.Generator().manual_seed(3), torch.zeros(2)
    for _ in range(8):
        case.draw(0.1, generator)
        for layer, held in enumerate(case.held):
            best = case.selection(layer)
            order = best.scores.argsort(dim=1, descending=True)
            ranked = best.positions.long().gather(1, order)
            there = (ranked[:, :, None] == held.positions[:, None, :]).any(dim=2)
            halves += torch.stack([(~half).sum() for half in there.split(TOPK // 2, dim=1)])
    assert halves[1] > 1.5 * halves[0]


def test_a_round_begins_anew_for_every_variant(scripts: Any, case: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    case.draw(0.1, generator)
    case.restore("off", None)
    before = {name: value.clone() for name, value in vars(case.world.manager.state).items()}
    case.run(case.world.plain)
    assert not torch.equal(before["host_to_device"], case.world.manager.state.host_to_device)
    case.restore("recorded", None)
    for name, value in vars(case.world.manager.state).items():
        if name != "workspace":
            assert torch.equal(value, before[name]), name
    thresholds = case.world.predictions.thresholds
    assert torch.equal(thresholds, case.thresholds["recorded"])
    assert not torch.equal(thresholds, case.thresholds["perfect"])


def test_perfect_predictions_are_the_kth_scores(scripts: Any, case: Any) -> None:
    case.draw(0.1, torch.Generator().manual_seed(3))
    for layer in range(LAYERS):
        assert torch.equal(case.thresholds["perfect"][layer], case.selection(layer).kth_scores)


def test_a_whole_run(
    scripts: Any, case: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round is checked, so that it is known by how many rows the sides differ in any."""
    run = scripts.Round.run

    def checked(self: Any, name: str, others: Any, *, check: bool) -> Any:
        return run(self, name, others, check=True)

    monkeypatch.setattr(scripts.Round, "run", checked)
    calls: list[int] = []
    found = scripts.measure(
        case, peer_of(scripts, case), lambda: calls.append(1), (0.0, 0.1), repeats=2
    )
    rounds = 2 + scripts.ahead.LEARNING
    assert len(calls) == 2 * rounds * 4  # before every replay
    names = ["HiSparse", "off", "perfect", "recorded"]
    for one, missing in zip(found, (0.0, 0.1), strict=True):
        assert one["missing"] == missing and list(one["us"]) == names
        rows = one["rows_a_layer"]
        want = round(missing * BATCH * TOPK)
        assert rows["off"] == {"recalled": want, "prefetched": 0, "useful": 0}
        assert abs(rows["HiSparse"]["recalled"] - want) <= one["selected_by_one_side_only"] * BATCH
        perfect = rows["perfect"]
        assert perfect["useful"] == perfect["prefetched"]  # nothing in vain
        assert perfect["recalled"] + perfect["useful"] >= want
        assert {name: len(us) for name, us in one["median_us_by_turn"].items()} == {
            "HiSparse": 2, "off": 2, "perfect": 2, "recorded": 2
        }  # fmt: skip
        for name in names[1:]:
            ratio = one["us"]["HiSparse"]["median"] / one["us"][name]["median"]
            assert one["ratio"][name] == ratio
    assert capsys.readouterr().out.count("segment, 3 x 512") == 2


def test_wrong_rows_are_not_timed(scripts: Any, case: Any) -> None:
    def careless(*args: Any) -> None:
        swap_in(*args)
        args[6][args[8][0, 0]] ^= 1  # one row of the device

    with pytest.raises(AssertionError, match="other bytes"):
        scripts.measure(case, peer_of(scripts, case, careless), lambda: None, (0.1,), repeats=1)


def test_a_wrong_set_is_found(scripts: Any) -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    for right in ([0, 2], [3, 0]):  # ties as they come
        assert scripts.is_topk(scores, torch.tensor([right]))
    for wrong in ([0, 1], [0, 0]):
        assert not scripts.is_topk(scores, torch.tensor([wrong]))


def test_everybody_goes_first_as_often(scripts: Any) -> None:
    orders = [scripts.turns.order("abcd", round_) for round_ in range(8)]
    for place in range(4):
        at = [names[place] for names in orders]
        assert all(at.count(name) == 2 for name in "abcd")
