"""A whole cache step captured once as a CUDA graph and replayed with other inputs."""

import random

import pytest
import torch
from tests.cache.harness import make_cache


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton-cuda", "cuda-cuda"])
def test_a_captured_step_serves_whatever_comes(name: str) -> None:
    """Captured with hostile inputs (nothing but -1), replayed with evictions in every step.

    Rows are released between replays, and an uncaptured step comes in between.
    """
    if name == "cuda-cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    cache = make_cache(name, layers=3, device_slots=40, host_slots=256, row_bytes=656)
    manager, device, rng = cache.manager, cache.device, random.Random(3)
    for layer in range(3):
        cache.append(layer, list(range(200)))
    new = cache.slots([-1] * 4)
    rows = torch.zeros(4, 656, dtype=torch.uint8, device=device)
    wanted, scores = cache.slots([[-1] * 8] * 4), torch.zeros(4, 8, device=device)

    def step() -> list[torch.Tensor]:
        manager.begin_step(most_rows=4 * (8 + 1))
        found = []
        for layer in range(3):
            manager.append(layer, new, rows, keep=4)
            found.append(manager.make_resident(layer, wanted, scores))
        manager.end_step()
        return found

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for position in range(200, 240, 4):
        fresh = list(range(position, position + 4))
        written = torch.randint(0, 255, (4, 656), dtype=torch.uint8)
        written_before = [slot for layer, slot in cache.truth if layer == 0]
        asked = [[*rng.sample(written_before, 6), fresh[row], -1] for row in range(4)]
        new.copy_(cache.slots(fresh))
        rows.copy_(written)
        wanted.copy_(cache.slots(asked))
        scores.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for layer, places in enumerate(found):
            for slot, row in zip(fresh, written, strict=True):
                cache.truth[layer, slot] = bytes(row.tolist())
            rows_now = manager.rows(layer).cpu()
            for slot, place in zip(
                wanted.flatten().tolist(), places.flatten().tolist(), strict=True
            ):
                assert (slot < 0) == (place < 0)
                if slot >= 0:
                    assert bytes(rows_now[place].tolist()) == cache.truth[layer, slot]
        manager.check(cache.live())
        if position % 3 == 0:
            gone = rng.sample(range(100), 20)
            cache.release([slot for slot in gone if (0, slot) in cache.truth])
        if position % 5 == 0:
            step()
            torch.cuda.synchronize()
    assert manager.counters()[2].evicted > 0
    cache.close()
