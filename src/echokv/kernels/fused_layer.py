"""One layer of the cache as one argument: what the fused ops read and change."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from echokv.kernels.cache_args import check_entries, check_layer, check_pools, check_scalars
from echokv.kernels.checks import check_tensor

TOTALS = 5
"""Columns of the totals: hits, recalled, evicted, written, allocated."""

CURSOR = 5
"""Columns of a cursor: names taken off the ready list so far; names on it that were selected or
written since it was made; its length; the floor when it was made; how many names were taken when
the step began."""

TAKEN, TOUCHED, LISTED, BEGAN = 0, 1, 2, 4
"""Those that are asked for by name."""

STALE = 1 << 30
"""In column TOUCHED: the list is not to be used in another step."""

MOST_NEW_ROWS = 64
"""New rows that `make_resident` takes in with a selection."""


@dataclass(frozen=True, kw_only=True)
class FusedLayer:
    """One layer's tensors. N_G device slots, N_H host slots; all but host_rows on the device."""

    floor: Tensor  # [1] int32: lowest priority that is protected in this step, its clock << 3
    device_free: Tensor  # [N_G] uint8: 1 is free
    priority: Tensor  # [N_G] int32: -1 when free
    device_to_host: Tensor  # [N_G] int32: -1 none
    host_to_device: Tensor  # [N_H] int32: -1 absent
    ready: Tensor  # [N_G] int32: who leaves first, as `choose_victims` lists them
    cursor: Tensor  # [CURSOR] int32: what is left of that list
    barrier: Tensor  # [1] int32 scratch: launches that may overlap need one each
    totals: Tensor  # [TOTALS] int64: counted since start
    host_rows: Tensor  # [N_H, row_bytes] uint8: host memory that the device reads and writes
    device_rows: Tensor  # [N_G, row_bytes] uint8

    def check(self) -> None:
        """Check shapes, dtypes, devices and strides.

        Raises:
            ValueError: with the tensor's name, what it is and what it must be.
        """
        device, slots = self.priority.device, self.device_rows.shape[0]
        check_layer(
            self.device_free, self.priority, self.device_to_host, self.host_to_device, self.ready
        )
        check_tensor("priority", self.priority, (slots,), torch.int32)
        check_tensor("host_to_device", self.host_to_device, (self.host_rows.shape[0],), torch.int32)
        check_tensor("totals", self.totals, (TOTALS,), torch.int64, device=device)
        check_tensor("cursor", self.cursor, (CURSOR,), torch.int32, device=device)
        check_scalars(device, floor=self.floor, barrier=self.barrier)
        check_pools(self.host_rows, self.device_rows)


@dataclass(frozen=True, kw_only=True)
class FusedLayers:
    """All layers' tensors, but for their rows: L layers of N_G device slots and N_H host slots."""

    floor: Tensor  # [1] int32
    device_free: Tensor  # [L, N_G] uint8
    priority: Tensor  # [L, N_G] int32
    device_to_host: Tensor  # [L, N_G] int32
    host_to_device: Tensor  # [L, N_H] int32
    ready: Tensor  # [L, N_G] int32
    cursor: Tensor  # [L, CURSOR] int32
    totals: Tensor  # [L, TOTALS] int64

    def check(self) -> None:
        """Check shapes, dtypes, devices and strides.

        Raises:
            ValueError: with the tensor's name, what it is and what it must be.
        """
        device, (layers, slots) = self.priority.device, self.priority.shape
        check_tensor("priority", self.priority, (None, None), torch.int32)
        for name in ("device_to_host", "ready"):
            check_tensor(name, getattr(self, name), (layers, slots), torch.int32, device=device)
        check_tensor("device_free", self.device_free, (layers, slots), torch.uint8, device=device)
        hosts = (layers, self.host_to_device.shape[1])
        check_tensor("host_to_device", self.host_to_device, hosts, torch.int32, device=device)
        check_tensor("cursor", self.cursor, (layers, CURSOR), torch.int32, device=device)
        check_tensor("totals", self.totals, (layers, TOTALS), torch.int64, device=device)
        check_scalars(device, floor=self.floor)


@dataclass(frozen=True)
class NewRows:
    """Rows of this step that are not in the cache yet."""

    host_slots: Tensor  # [N] int32, distinct, -1 for rows to skip
    rows: Tensor  # [N, row_bytes] uint8, on the device

    @classmethod
    def none(cls, layer: FusedLayer) -> Self:
        """No rows."""
        return cls(layer.priority[:0], layer.device_rows[:0])

    def check(self, layer: FusedLayer) -> None:
        """Check shapes, dtypes and devices against those of the layer that they go to.

        Raises:
            ValueError: with the tensor's name, what it is and what it must be.
        """
        device = layer.priority.device
        check_entries(device, self.host_slots)
        shape = (self.host_slots.shape[0], layer.device_rows.shape[1])
        check_tensor("rows", self.rows, shape, torch.uint8, device=device)
