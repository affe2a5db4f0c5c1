"""An offloaded cache of tiny pools, with the truth about every row kept beside it."""

from dataclasses import dataclass, field

import torch
from tests.kernels.cuda_emulator import emulated_kernels
from torch import Tensor

from echokv.cache.manager import CacheManager
from echokv.kernels.protocol import Kernels
from echokv.kernels.registry import load_kernels
from echokv.memory.pools import DevicePool, HostPool
from echokv.memory.slots import HostSlots

BACKENDS = ("reference-cpu", "triton-interpreter", "cuda-emulated", "triton-cuda", "cuda-cuda")
POISON = 0xFF
"""As a byte of any row format it makes NaNs: float32, bfloat16 and e4m3 alike."""


@dataclass
class Cache:
    """A manager, its pools, and what was written where."""

    manager: CacheManager
    host_pool: HostPool
    device_pool: DevicePool
    device: torch.device
    truth: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (layer, host slot)

    @property
    def row_bytes(self) -> int:
        return self.device_pool.rows.shape[2]

    def slots(self, values: list[int] | list[list[int]]) -> HostSlots:
        return HostSlots(torch.tensor(values, dtype=torch.int32, device=self.device))

    def append(
        self,
        layer: int,
        host_slots: list[int],
        keep: int | None = None,
        *,
        until_selected: bool = False,
    ) -> None:
        """Write fresh random rows, and note them."""
        rows = torch.randint(0, 255, (len(host_slots), self.row_bytes), dtype=torch.uint8)
        for slot, row in zip(host_slots, rows, strict=True):
            if slot >= 0:
                self.truth[layer, slot] = bytes(row.tolist())
        keep = min(len(host_slots), self.manager.capacity) if keep is None else keep
        self.manager.append(
            layer, self.slots(host_slots), rows.to(self.device), keep=keep,
            until_selected=until_selected,
        )  # fmt: skip

    def fetch(self, layer: int, wanted: list[list[int]], scores: Tensor | None = None) -> list:
        """make_resident, then compare every row it names with the truth."""
        slots = self.slots(wanted)
        if scores is None:
            scores = torch.rand(slots.shape, device=self.device)
        found = self.manager.make_resident(layer, slots, scores)
        assert found.shape == slots.shape
        assert found.dtype == torch.int32
        rows = self.manager.rows(layer)
        for asked, given in zip(slots.flatten().tolist(), found.flatten().tolist(), strict=True):
            assert (asked < 0) == (given < 0)
            if asked >= 0:
                assert bytes(rows[given].tolist()) == self.truth[layer, asked]
        return found.tolist()

    def resident(self, layer: int) -> dict[int, int]:
        """Host slot -> device slot, from the tensors."""
        owners = self.manager.state.device_to_host[layer].tolist()
        return {owner: slot for slot, owner in enumerate(owners) if owner >= 0}

    def release(self, host_slots: list[int]) -> None:
        """Release, and poison what no one may read any more, on both sides."""
        held = [self.resident(layer) for layer in range(self.manager.state.num_layers)]
        self.manager.release(torch.tensor(host_slots, dtype=torch.int32))
        for layer, places in enumerate(held):
            for slot in host_slots:
                self.host_pool.rows[layer, slot] = POISON
                self.truth.pop((layer, slot), None)
                if slot in places:
                    self.device_pool.rows[layer, places[slot]] = POISON

    def live(self) -> Tensor:
        """[N_H] bool: host slots that hold a row."""
        mask = torch.zeros(self.manager.state.host_slots, dtype=torch.bool)
        mask[[slot for _, slot in self.truth]] = True
        return mask

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.host_pool.close()


def kernels_of(backend: str) -> tuple[Kernels, torch.device]:
    """The kernels that one of BACKENDS names, and where their tensors live."""
    name, _, place = backend.partition("-")
    device = torch.device("cuda" if place == "cuda" else "cpu")
    return emulated_kernels() if place == "emulated" else load_kernels(name, device), device


def make_cache(
    backend: str,
    *,
    layers: int = 2,
    device_slots: int = 12,
    host_slots: int = 64,
    row_bytes: int = 40,
) -> Cache:
    """An empty cache; both pools are full of poison."""
    kernels, device = kernels_of(backend)
    host_pool = HostPool(layers, host_slots, row_bytes, device)
    device_pool = DevicePool(layers, device_slots, row_bytes, device)
    host_pool.rows.fill_(POISON)
    device_pool.rows.fill_(POISON)
    manager = CacheManager(kernels, host_pool, device_pool)
    return Cache(manager, host_pool, device_pool, device)
