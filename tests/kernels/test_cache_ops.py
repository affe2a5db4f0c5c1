"""The cache ops of every backend against plain Python, entry by entry."""

import random
from collections.abc import Callable

import pytest
import torch
from tests.kernels.cache_model import LayerModel, LayerTensors, random_layer
from torch import Tensor

TOP = 2**31 - 9
"""A floor near the end of int32: every digit of a priority matters."""

SIZES = [(1, 1), (7, 5), (63, 64), (64, 200), (1024, 1500), (1025, 3000)]


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def dirty(size: int, device: torch.device) -> Tensor:
    """An output that must be overwritten in full."""
    return torch.full((size,), -77, dtype=torch.int32, device=device)


def padded(values: list[int], size: int) -> list[int]:
    return values + [-1] * (size - len(values))


def pick(rng: random.Random, host_slots: int, entries: int) -> list[int]:
    """Host slots with -1 and duplicates among them."""
    pool = rng.sample(range(host_slots), min(host_slots, entries))
    return [rng.choice(pool) if rng.random() > 0.15 else -1 for _ in range(entries)]


def run_lookup(backend, model: LayerModel, slots: list[int], priorities: list[int], floor: int):
    tensors = LayerTensors.of(model, backend.device)
    missing, count = dirty(len(slots), backend.device), dirty(1, backend.device)
    hits = dirty(1, backend.device)
    backend.op("lookup")(
        ints(slots, backend.device),
        ints(priorities, backend.device),
        ints([floor], backend.device),
        tensors.host_to_device,
        tensors.priority,
        missing,
        count,
        hits,
        tensors.workspace,
    )
    want, want_hits = model.lookup(slots, priorities, floor)
    assert missing.tolist() == padded(want, len(slots))
    assert (count.item(), hits.item()) == (len(want), want_hits)
    tensors.assert_is(model)


@pytest.mark.parametrize(("device_slots", "host_slots"), SIZES)
@pytest.mark.parametrize("entries", [1, 63, 2048, 2049, 3500])
def test_lookup(backend, device_slots: int, host_slots: int, entries: int) -> None:
    rng = random.Random(device_slots + entries)
    model = random_layer(rng, device_slots, host_slots, min(device_slots, host_slots) * 2 // 3, TOP)
    slots = pick(rng, host_slots, entries)
    floor = TOP - 100
    run_lookup(backend, model, slots, [floor + rng.randrange(8) for _ in slots], floor)


def test_lookup_of_nothing_but_padding(backend) -> None:
    model = LayerModel(4, 9, {0: (3, 1)})
    run_lookup(backend, model, [-1] * 70, [9] * 70, 8)


@pytest.mark.parametrize("entries", [1100, 2100])
def test_lookup_where_every_entry_is_the_same_absent_slot(backend, entries: int) -> None:
    model = LayerModel(4, 9, {0: (3, 1)})
    run_lookup(backend, model, [5] * entries, [9] * entries, 8)


def test_lookup_of_no_entries(backend) -> None:
    run_lookup(backend, LayerModel(4, 9, {0: (3, 1)}), [], [], 8)


def test_lookup_orders_missing_by_last_occurrence(backend) -> None:
    model = LayerModel(4, 9, {0: (3, 1)})
    slots = [5, 6, 7, 5, -1, 8, 6, 3]
    run_lookup(backend, model, slots, [9] * len(slots), 8)
    assert model.lookup(slots, [9] * len(slots), 8)[0] == [7, 5, 8, 6]  # the model itself


def test_lookup_counts_a_row_once_a_step(backend) -> None:
    """Rows written in this step stand at the floor; selecting them counts, selecting twice not."""
    model = LayerModel(8, 20, {0: (3, 8), 1: (4, 2), 2: (5, 9), 5: (6, 7)})
    run_lookup(backend, model, [3, 4, 5, 3, 4], [9, 10, 15, 11, 9], 8)
    assert model.held == {0: (3, 11), 1: (4, 10), 2: (5, 15), 5: (6, 7)}


def run_free(backend, model: LayerModel, needed: int, floor: int) -> list[int]:
    tensors = LayerTensors.of(model, backend.device)
    freed = dirty(1, backend.device)
    backend.op("free")(
        ints([needed], backend.device),
        ints([floor], backend.device),
        *tensors.mappings(),
        tensors.slot_buffer,
        freed,
        tensors.workspace,
    )
    victims = model.free(needed, floor)
    assert tensors.slot_buffer.tolist() == padded(victims, model.device_slots)
    assert freed.item() == len(victims)
    tensors.assert_is(model)
    return victims


@pytest.mark.parametrize(("device_slots", "host_slots"), SIZES)
@pytest.mark.parametrize("top", [1, 3, 2**11, 2**21 + 5, TOP])
def test_free(backend, device_slots: int, host_slots: int, top: int) -> None:
    """Every amount from none to more than can go, with ties, over every digit of a priority."""
    rng = random.Random(device_slots + top)
    most = min(device_slots, host_slots)
    amounts = [0, 1, device_slots // 2, device_slots - 1, device_slots]
    if backend.interpreted:
        amounts = rng.sample(amounts[1:], 2)
    for held in {most // 2, most}:
        for needed in amounts:
            model = random_layer(rng, device_slots, host_slots, held, top)
            run_free(backend, model, needed, rng.choice([top, max(1, top // 2)]))


def test_free_when_all_is_free_or_nothing_is_needed(backend) -> None:
    assert run_free(backend, LayerModel(70, 90), 70, 8) == []
    assert run_free(backend, LayerModel(2, 9, {0: (3, 1), 1: (4, 2)}), 0, 8) == []


def test_free_takes_the_lower_slot_of_equal_priorities(backend) -> None:
    model = LayerModel(6, 9, {5: (0, 4), 1: (1, 4), 3: (2, 4), 0: (3, 6), 2: (4, 4), 4: (5, 3)})
    assert run_free(backend, model, 3, 8) == [1, 2, 4]


def test_free_never_takes_what_is_protected(backend) -> None:
    model = LayerModel(4, 9, {0: (0, 8), 1: (1, 9), 2: (2, 7), 3: (3, 8)})
    assert run_free(backend, model, 4, 8) == [2]


def test_free_twice_reuses_its_scratch(backend) -> None:
    rng = random.Random(5)
    model = random_layer(rng, 300, 400, 300, 50)
    tensors = LayerTensors.of(model, backend.device)
    freed = dirty(1, backend.device)
    for needed in (40, 100, 100, 230):
        backend.op("free")(
            ints([needed], backend.device),
            ints([50], backend.device),
            *tensors.mappings(),
            tensors.slot_buffer,
            freed,
            tensors.workspace,
        )
        assert tensors.slot_buffer.tolist() == padded(model.free(needed, 50), 300)
    tensors.assert_is(model)


@pytest.mark.parametrize(("device_slots", "host_slots"), SIZES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_allocate(backend, device_slots: int, host_slots: int, share: float) -> None:
    rng = random.Random(device_slots)
    held = int(min(device_slots, host_slots) * share)
    model = random_layer(rng, device_slots, host_slots, held, 100)
    absent = sorted(set(range(host_slots)) - {owner for owner, _ in model.held.values()})
    rng.shuffle(absent)
    for count in {0, 1, len(absent) // 2, min(len(absent), device_slots)}:
        if count > min(len(absent), device_slots):
            continue
        check_allocate(
            backend, LayerModel(device_slots, host_slots, dict(model.held)), absent, count
        )


def check_allocate(backend, model: LayerModel, absent: list[int], count: int) -> None:
    """More wanted than free is allowed: what finds no room changes nothing."""
    tensors = LayerTensors.of(model, backend.device)
    given = dirty(1, backend.device)
    wanted = padded(absent[:count], model.device_slots)
    backend.op("allocate")(
        ints(wanted, backend.device),
        ints([count], backend.device),
        ints([TOP], backend.device),
        *tensors.mappings(),
        tensors.slot_buffer,
        given,
        tensors.workspace,
    )
    want = model.allocate(absent[:count], TOP)
    assert tensors.slot_buffer.tolist() == padded(want, model.device_slots)
    assert given.item() == len(want)
    tensors.assert_is(model)


@pytest.mark.parametrize(("device_slots", "host_slots"), SIZES)
@pytest.mark.parametrize("entries", [1, 63, 1500])
def test_translate(backend, device_slots: int, host_slots: int, entries: int) -> None:
    rng = random.Random(entries)
    model = random_layer(rng, device_slots, host_slots, min(device_slots, host_slots) // 2, TOP)
    tensors = LayerTensors.of(model, backend.device)
    slots = pick(rng, host_slots, entries)
    priorities = [rng.randrange(TOP) for _ in slots]
    found = dirty(entries, backend.device)
    backend.op("translate")(
        ints(slots, backend.device),
        ints(priorities, backend.device),
        tensors.host_to_device,
        tensors.priority,
        found,
    )
    assert found.tolist() == model.translate(slots, priorities)
    tensors.assert_is(model)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def host_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Host memory that the device can read: pinned when it is a GPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


@pytest.mark.parametrize("row_bytes", [656, 1152, 40, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 70])
def test_recall(backend, row_bytes: int, count: int) -> None:
    host_rows = host_memory(random_bytes(100, row_bytes), backend.device)
    device_rows = random_bytes(90, row_bytes)
    rng = random.Random(count)
    sources, targets = rng.sample(range(100), 90), rng.sample(range(90), 90)
    want = device_rows.clone()
    for source, target in list(zip(sources, targets, strict=True))[:count]:
        want[target] = host_rows[source]
    got = device_rows.to(backend.device)
    backend.op("recall")(
        ints(sources, backend.device),
        ints([count], backend.device),
        ints(padded(targets[:count], 90), backend.device),
        host_rows,
        got,
    )
    assert torch.equal(got.cpu(), want)


def test_recall_skips_rows_that_found_no_room(backend) -> None:
    host_rows = host_memory(random_bytes(8, 656), backend.device)
    got = torch.zeros(4, 656, dtype=torch.uint8, device=backend.device)
    backend.op("recall")(
        ints([7, 6, 5, 4], backend.device),
        ints([4], backend.device),
        ints([2, 0, -1, -1], backend.device),
        host_rows,
        got,
    )
    assert torch.equal(got.cpu()[[2, 0]], host_rows[[7, 6]])
    assert not got[[1, 3]].any()


@pytest.mark.parametrize("row_bytes", [656, 1152, 40, 4])
@pytest.mark.parametrize("entries", [1, 5, 70])
def test_write_rows(backend, row_bytes: int, entries: int) -> None:
    """Every named host row is written, resident or not; no other byte of either pool changes."""
    rng = random.Random(entries)
    model = random_layer(rng, 60, 100, 40, 50)
    tensors = LayerTensors.of(model, backend.device)
    rows, host_rows, device_rows = (random_bytes(n, row_bytes) for n in (entries, 100, 60))
    slots = [slot if rng.random() > 0.2 else -1 for slot in rng.sample(range(100), entries)]
    want_host, want_device = host_rows.clone(), device_rows.clone()
    for row, slot in zip(rows, slots, strict=True):
        if slot < 0:
            continue
        want_host[slot] = row
        if (place := model.find(slot)) is not None:
            want_device[place] = row
    host_rows = host_memory(host_rows, backend.device)
    got = device_rows.to(backend.device)
    backend.op("write_rows")(
        rows.to(backend.device),
        ints(slots, backend.device),
        tensors.host_to_device,
        host_rows,
        got,
    )
    if backend.device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host_rows, want_host)
    assert torch.equal(got.cpu(), want_device)


FAR_HOST_ROWS = [0, 3_276_800, 3_728_271, 6_547_206, 7_000_000]
"""Byte offsets on both sides of 2^31 and 2^32 at 656 B; 3,728,271 is where a peer overflowed."""


def test_offsets_past_four_gib(backend, lazy_bytes: Callable[[int, torch.device], Tensor]) -> None:
    """Rows far into the host pool and into the device pool arrive where they belong."""
    rows_each = 7_000_001
    if backend.device.type == "cuda":
        host_rows = torch.empty(rows_each * 656, dtype=torch.uint8, pin_memory=True)
    else:
        host_rows = lazy_bytes(rows_each * 656, backend.device)
    host_rows = host_rows.view(rows_each, 656)
    device_rows = lazy_bytes(rows_each * 656, backend.device).view(rows_each, 656)
    rows = random_bytes(len(FAR_HOST_ROWS), 656)
    far = ints(FAR_HOST_ROWS, backend.device)
    absent = dirty(rows_each, backend.device).fill_(-1)
    backend.op("write_rows")(rows.to(backend.device), far, absent, host_rows, device_rows)
    slot_buffer = dirty(rows_each, backend.device).fill_(-1)
    slot_buffer[: len(FAR_HOST_ROWS)] = far.flip(0)
    backend.op("recall")(
        far, ints([len(FAR_HOST_ROWS)], backend.device), slot_buffer, host_rows, device_rows
    )
    assert torch.equal(device_rows[far.flip(0).long()].cpu(), rows)
    assert torch.equal(host_rows[far.cpu().long()], rows)


def test_release_in_every_layer(backend) -> None:
    rng = random.Random(1)
    models = [random_layer(rng, 90, 200, held, 50) for held in (90, 0, 41)]
    layers = [LayerTensors.of(model, backend.device) for model in models]
    stacked = [
        torch.stack(parts) for parts in zip(*(one.mappings() for one in layers), strict=True)
    ]
    gone = [rng.randrange(200) for _ in range(80)] + [-1, -1]
    backend.op("release")(ints(gone, backend.device), *stacked)
    for index, (model, layer) in enumerate(zip(models, layers, strict=True)):
        model.release(gone)
        layer.device_free, layer.priority, layer.device_to_host, layer.host_to_device = (
            part[index] for part in stacked
        )
        layer.assert_is(model)


def test_release_of_nothing(backend) -> None:
    model = LayerModel(3, 9, {0: (3, 1)})
    tensors = LayerTensors.of(model, backend.device)
    backend.op("release")(
        ints([], backend.device), *(part.unsqueeze(0) for part in tensors.mappings())
    )
    tensors.assert_is(model)


def tick(backend, clock: int, priority: list[list[int]]) -> tuple[int, int, list[list[int]]]:
    device = backend.device
    clock_tensor, floor, levels = ints([clock], device), dirty(1, device), ints(priority, device)
    backend.op("tick")(clock_tensor, floor, levels)
    return clock_tensor.item(), floor.item(), levels.tolist()


def test_tick_advances_and_leaves_priorities_alone(backend) -> None:
    assert tick(backend, 41, [[-1, 0, 336, 343]]) == (42, 336, [[-1, 0, 336, 343]])


def test_tick_rebases_before_priorities_overflow(backend) -> None:
    """Order, ties and distances of recent rows survive; -1 stays; old rows end at 0."""
    clock = (3 << 26) - 1
    rng = random.Random(3)
    recent = [((clock - rng.randrange(2**27 - 1)) << 3) + rng.randrange(8) for _ in range(1200)]
    old = [rng.randrange(2**20) for _ in range(100)]
    now, floor, (levels, _) = tick(backend, clock, [[*recent, *old, -1], [-1] * 1301])
    shift = (clock + 1 - now) << 3
    assert now == 1 << 27
    assert floor == now << 3
    assert levels == [level - shift for level in recent] + [0] * 100 + [-1]
    assert max(levels) < floor
    assert min(levels[:1200]) > 0


@pytest.mark.parametrize("wrong", ["dtype", "shape", "strides"])
def test_wrappers_refuse_wrong_tensors(backend, wrong: str) -> None:
    device = backend.device
    slots = {
        "dtype": torch.zeros(4, dtype=torch.int64, device=device),
        "shape": torch.zeros(2, 2, dtype=torch.int32, device=device),
        "strides": torch.zeros(8, dtype=torch.int32, device=device)[::2],
    }[wrong]
    with pytest.raises(ValueError, match="host_slots"):
        backend.op("translate")(slots, *(ints([-1] * 4, device) for _ in range(4)))
