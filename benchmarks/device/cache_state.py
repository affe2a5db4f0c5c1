"""Layers of a cache in a state that can be put back before every replay, and selections over it.

For `cache_ops.py`. Every layer holds random host slots in all its device slots, used in the order
of a random list; the slots used last are what selections find resident, so that who leaves is
nobody that they name.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.cache.manager import CacheManager
from echokv.cache.ready import ReadyLists
from echokv.kernels.fused_layer import BEGAN
from echokv.memory.slots import HostSlots

CLOCK = 3000  # rows were used in the last thousand steps, whose order lists keep
RECENT = 0.75  # of the device slots, those that selections may find


@dataclass(frozen=True, kw_only=True)
class Selected:
    """One layer's selection, and which of it is absent."""

    wanted: Tensor  # [T, k] int32
    absent: Tensor  # [m] int32


class CacheState:
    """A manager's tensors as they are before a step, and how to get back there.

    Args:
        manager: whose state it is; nothing has been done with it yet.
        seed: of what lies where.
    """

    def __init__(self, manager: CacheManager, seed: int = 1) -> None:
        state, self.manager = manager.state, manager
        device = state.priority.device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        slots, ages = state.device_slots, 1000
        for layer in range(state.num_layers):
            owners = self.shuffled(state.host_slots)[:slots]
            places = torch.arange(slots, dtype=torch.int32, device=device)
            state.device_to_host[layer] = owners
            state.host_to_device[layer, owners.long()] = places
            order = self.shuffled(slots)
            levels = (CLOCK - ages + places.long() * (ages - 1) // slots) << 3
            state.priority[layer, order.long()] = levels.to(torch.int32)
        state.device_free.fill_(0)
        state.clock.fill_(CLOCK - 1)
        manager.begin_step()  # lists, all names on them
        self.recent = [
            state.priority[layer].argsort()[round(slots * (1 - RECENT)) :]
            for layer in range(state.num_layers)
        ]
        if manager._ready is not None:
            self._have_used(manager._ready)
        self.tensors = [state.device_to_host, state.host_to_device, state.priority,
                        state.device_free, state.slot_buffer, state.clock, state.floor]  # fmt: skip
        if manager._ready is not None:
            self.tensors.append(manager._ready._cursors)
        self.saved = [tensor.clone() for tensor in self.tensors]

    def _have_used(self, ready: ReadyLists) -> None:
        """As if the lists had been made before the recent slots were used last."""
        for layer, recent in enumerate(self.recent):
            oldest = int(self.manager.state.priority[layer, recent].min())
            names = [0, recent.shape[0], self.manager.state.device_slots, oldest, 0]
            ready._cursors[layer] = torch.tensor(names, dtype=torch.int32)

    @property
    def ready(self) -> ReadyLists:
        """The manager's lists."""
        assert self.manager._ready is not None
        return self.manager._ready

    def restore(self, taken: int = 0) -> None:
        """Everything as it was, the lists too, after a step that took so many slots a layer."""
        for tensor, saved in zip(self.tensors, self.saved, strict=True):
            tensor.copy_(saved)
        if taken:
            self.ready._cursors[:, BEGAN] = -taken

    def shuffled(self, count: int) -> Tensor:
        """[count] int32, the numbers below in random order."""
        device = self.manager.state.priority.device
        order = torch.randperm(count, device=device, generator=self.generator)
        return order.to(torch.int32)

    def select(self, layer: int, batch: int, topk: int, misses: int, span: int) -> Selected:
        """Distinct host slots of which some are absent.

        Args:
            layer: decoder layer.
            batch: rows.
            topk: entries of a row.
            misses: absent ones.
            span: absent ones lie below this host slot.
        """
        state, entries = self.manager.state, batch * topk
        saved = self.saved[1][layer, :span]
        absent = (saved < 0).nonzero().squeeze(1).to(torch.int32)
        absent = absent[self.shuffled(absent.shape[0])[:misses].long()]
        recent = self.recent[layer]
        slots = recent[self.shuffled(recent.shape[0])[: entries - misses].long()]
        chosen = torch.cat([absent, self.saved[0][layer, slots]])
        assert chosen.shape[0] == entries, f"{state.device_slots} slots hold too few for {entries}"
        wanted = chosen[self.shuffled(entries).long()].view(batch, topk)
        return Selected(wanted=HostSlots(wanted), absent=absent)

    def verify(self, layer: int, selected: Selected, device_slots: Tensor) -> bool:
        """Whether device_slots says where all of it is, and what was absent has its bytes."""
        state, manager = self.manager.state, self.manager
        found, wanted = device_slots.flatten().long(), selected.wanted.flatten()
        if not bool((found >= 0).all()):
            return False
        good = torch.equal(state.device_to_host[layer, found], wanted)
        places = state.host_to_device[layer, selected.absent.long()].long()
        rows = manager.rows(layer)[places].cpu()
        return good and torch.equal(
            rows, manager._host_pool.rows[layer, selected.absent.cpu().long()]
        )
