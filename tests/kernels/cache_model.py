"""The cache ops in plain Python lists and dicts: what the tensors of one layer must come to."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echokv.kernels.cache_args import WORKSPACE_INTS

Entries = list[tuple[int, int]]


@dataclass
class LayerModel:
    """One layer as Python sees it: device slot -> (host slot, priority), nothing else."""

    device_slots: int
    host_slots: int
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def find(self, host_slot: int) -> int | None:
        """The device slot that holds a host slot."""
        for slot, (owner, _) in self.held.items():
            if owner == host_slot:
                return slot
        return None

    def raise_priority(self, slot: int, priority: int) -> None:
        """Never lowers it."""
        owner, old = self.held[slot]
        self.held[slot] = (owner, max(old, priority))

    def lookup(self, host_slots: list[int], priorities: list[int], floor: int) -> tuple[list, int]:
        """Returns the missing host slots and the number of newly protected rows."""
        where = {owner: slot for slot, (owner, _) in self.held.items()}
        protected = {slot for slot, (_, priority) in self.held.items() if priority > floor}
        missing: dict[int, None] = {}
        for host_slot, priority in zip(host_slots, priorities, strict=True):
            if host_slot < 0:
                continue
            if host_slot in where:
                self.raise_priority(where[host_slot], priority)
            else:
                missing.pop(host_slot, None)  # the last occurrence decides the order
                missing[host_slot] = None
        after = {slot for slot, (_, priority) in self.held.items() if priority > floor}
        return list(missing), len(after - protected)

    def free(self, needed: int, floor: int) -> list[int]:
        """Returns the victims in ascending order."""
        short = max(0, needed - (self.device_slots - len(self.held)))
        ranked = sorted(
            (priority, slot) for slot, (_, priority) in self.held.items() if priority < floor
        )
        victims = sorted(slot for _, slot in ranked[:short])
        for slot in victims:
            del self.held[slot]
        return victims

    def allocate(self, host_slots: list[int], floor: int) -> list[int]:
        """Returns the device slots given, shorter than host_slots when there are too few."""
        available = [slot for slot in range(self.device_slots) if slot not in self.held]
        given = available[: len(host_slots)]
        for slot, owner in zip(given, host_slots, strict=False):
            self.held[slot] = (owner, floor)
        return given

    def translate(self, host_slots: list[int], priorities: list[int]) -> list[int]:
        """Returns device slots, -1 for -1 and for absent rows."""
        where = {owner: slot for slot, (owner, _) in self.held.items()}
        found = [where.get(host_slot, -1) for host_slot in host_slots]
        for slot, priority in zip(found, priorities, strict=True):
            if slot >= 0:
                self.raise_priority(slot, priority)
        return found

    def release(self, host_slots: list[int]) -> None:
        """Forget host slots."""
        gone = set(host_slots)
        self.held = {slot: held for slot, held in self.held.items() if held[0] not in gone}


@dataclass
class LayerTensors:
    """The tensors that the ops take, scalars and scratch included."""

    device_free: Tensor
    priority: Tensor
    device_to_host: Tensor
    host_to_device: Tensor
    slot_buffer: Tensor
    workspace: Tensor

    @classmethod
    def of(cls, model: LayerModel, device: torch.device) -> "LayerTensors":
        """Tensors in the state of a model, slot_buffer full of a value that no op leaves."""
        slots = range(model.device_slots)
        nothing = (-1, -1)
        tensors = cls(
            device_free=torch.tensor([slot not in model.held for slot in slots], dtype=torch.uint8),
            priority=_ints([model.held.get(slot, nothing)[1] for slot in slots]),
            device_to_host=_ints([model.held.get(slot, nothing)[0] for slot in slots]),
            host_to_device=_ints([-1] * model.host_slots),
            slot_buffer=_ints([-77] * model.device_slots),
            workspace=torch.zeros(WORKSPACE_INTS, dtype=torch.int32),
        )
        for slot, (owner, _) in model.held.items():
            tensors.host_to_device[owner] = slot
        for name, tensor in vars(tensors).items():
            setattr(tensors, name, tensor.to(device))
        return tensors

    def mappings(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which `free` and `allocate` take them."""
        return self.device_free, self.priority, self.device_to_host, self.host_to_device

    def assert_is(self, model: LayerModel) -> None:
        """Every entry of every tensor is what the model says."""
        want = LayerTensors.of(model, torch.device("cpu"))
        for name in ("device_free", "priority", "device_to_host", "host_to_device"):
            assert getattr(self, name).tolist() == getattr(want, name).tolist(), name


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_layer(
    rng: random.Random, device_slots: int, host_slots: int, held: int, top_priority: int
) -> LayerModel:
    """A layer with `held` rows in random places; priorities below top_priority with many ties."""
    model = LayerModel(device_slots, host_slots)
    levels = [rng.randrange(top_priority) for _ in range(1 + held // 5)]
    owners = rng.sample(range(host_slots), held)
    for slot, owner in zip(rng.sample(range(device_slots), held), owners, strict=True):
        model.held[slot] = (owner, rng.choice(levels))
    return model


def layer_in_use(
    rng: random.Random, device_slots: int, host_slots: int, share: float, floor: int
) -> LayerModel:
    """A layer whose priorities lie below the floor, most of them not far below."""
    model = random_layer(rng, device_slots, host_slots, int(device_slots * share), floor)
    recent = max(0, floor - 400)
    model.held = {
        slot: (owner, max(level, rng.randrange(recent, floor)) if rng.random() < 0.8 else level)
        for slot, (owner, level) in model.held.items()
    }
    return model
