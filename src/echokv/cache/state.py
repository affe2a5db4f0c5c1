"""Who is where: the fixed-shape tensors of every layer's device pool, and their invariants.

Knows addresses only; rows live in the pools. The ops of `kernels/*` change these tensors in
place; nothing here is called in a forward pass except to slice out a layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.errors import EchoKVError
from echokv.kernels.cache_args import WORKSPACE_INTS
from echokv.memory.slots import NO_SLOT


class CacheInvariantError(EchoKVError):
    """The cache is not what it must be: a bug in echokv; the message carries the numbers."""


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """One layer's view of a `CacheState`; writing to it writes to the whole."""

    device_free: Tensor  # [N_G] uint8
    priority: Tensor  # [N_G] int32
    slot_buffer: Tensor  # [N_G] int32
    device_to_host: Tensor  # [N_G] int32
    host_to_device: Tensor  # [N_H] int32


@dataclass(frozen=True, kw_only=True)
class CacheState:
    """All layers. L layers, N_G device slots a layer, N_H host slots."""

    device_free: Tensor  # [L, N_G] uint8: 1 is free
    priority: Tensor  # [L, N_G] int32: lowest goes first; -1 when free
    slot_buffer: Tensor  # [L, N_G] int32: what free and allocate produced; -1 unused
    device_to_host: Tensor  # [L, N_G] int32: -1 none
    host_to_device: Tensor  # [L, N_H] int32: -1 absent
    clock: Tensor  # [1] int32: cache steps begun, less what rebases took off
    floor: Tensor  # [1] int32: lowest priority that is protected in this step
    workspace: Tensor  # [WORKSPACE_INTS] int32: scratch of the ops

    @classmethod
    def create(
        cls, num_layers: int, device_slots: int, host_slots: int, device: torch.device
    ) -> "CacheState":
        """A state in which every device slot is free and every host slot absent."""

        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        state = cls(
            device_free=full((num_layers, device_slots), 1, torch.uint8),
            priority=full((num_layers, device_slots), -1),
            slot_buffer=full((num_layers, device_slots), NO_SLOT),
            device_to_host=full((num_layers, device_slots), NO_SLOT),
            host_to_device=full((num_layers, host_slots), NO_SLOT),
            clock=full((1,), 0),
            floor=full((1,), 0),
            workspace=full((WORKSPACE_INTS,), 0),
        )
        assert state.metadata_bytes_per_layer <= 4 * host_slots + 13 * device_slots
        return state

    @property
    def num_layers(self) -> int:
        """L."""
        return self.priority.shape[0]

    @property
    def device_slots(self) -> int:
        """N_G, device slots a layer."""
        return self.priority.shape[1]

    @property
    def host_slots(self) -> int:
        """N_H, host slots."""
        return self.host_to_device.shape[1]

    @property
    def metadata_bytes_per_layer(self) -> int:
        """Bytes of one layer's tensors: 4 N_H + 13 N_G, the paper's figure."""
        return sum(
            tensor[0].numel() * tensor.element_size()
            for tensor in (
                self.device_free,
                self.priority,
                self.slot_buffer,
                self.device_to_host,
                self.host_to_device,
            )
        )

    def layer(self, index: int) -> LayerState:
        """Views of one layer."""
        return LayerState(
            device_free=self.device_free[index],
            priority=self.priority[index],
            slot_buffer=self.slot_buffer[index],
            device_to_host=self.device_to_host[index],
            host_to_device=self.host_to_device[index],
        )

    def check(self) -> None:
        """Verify in every layer that mappings agree and free means free; synchronises.

        Raises:
            CacheInvariantError: with the layer and the slots at fault.
        """
        for index in range(self.num_layers):
            self._check_mappings(index)
            self._check_free(index)

    def _check_mappings(self, index: int) -> None:
        """Both mappings name each other."""
        state = self.layer(index)
        _fail_if(
            (state.device_to_host < NO_SLOT) | (state.device_to_host >= self.host_slots),
            f"layer {index}: device_to_host out of range at device slots",
        )
        _fail_if(
            (state.host_to_device < NO_SLOT) | (state.host_to_device >= self.device_slots),
            f"layer {index}: host_to_device out of range at host slots",
        )
        device = torch.arange(self.device_slots, device=state.priority.device)
        host = torch.arange(self.host_slots, device=state.priority.device)
        back = state.host_to_device[state.device_to_host.clamp(min=0).long()]
        _fail_if(
            (state.device_to_host >= 0) & (back != device),
            f"layer {index}: device_to_host has no mapping back at device slots",
        )
        back = state.device_to_host[state.host_to_device.clamp(min=0).long()]
        _fail_if(
            (state.host_to_device >= 0) & (back != host),
            f"layer {index}: host_to_device has no mapping back at host slots",
        )

    def _check_free(self, index: int) -> None:
        """Free exactly when no host slot is held and the priority is -1."""
        state = self.layer(index)
        is_free = state.device_free == 1
        _fail_if(
            (state.device_free > 1)
            | (is_free != (state.device_to_host == NO_SLOT))
            | (is_free != (state.priority == -1))
            | (state.priority < -1),
            f"layer {index}: device_free, device_to_host and priority disagree at device slots",
        )


def _fail_if(bad: Tensor, message: str) -> None:
    if bool(bad.any()):
        where = bad.nonzero().squeeze(1)
        raise CacheInvariantError(f"{message} {where[:8].tolist()} ({where.shape[0]} in all)")
