"""What must hold of a cache beyond its state: rows, room, and who may be resident; synchronises.

For tests and --check-cache; every function reads back what it needs.
"""

from torch import Tensor

from echokv.cache.reserve import ALLOCATED, RECALLED, WRITTEN
from echokv.cache.state import CacheInvariantError, CacheState
from echokv.errors import CapacityError


def live_slots(state: CacheState, live_host_slots: Tensor) -> Tensor:
    """[L, N_G] bool: device slots that hold a live host slot.

    Args:
        state: the cache's.
        live_host_slots: [N_H] bool on any device.
    """
    owners = state.device_to_host
    live = live_host_slots.to(owners.device)[owners.clamp(min=0).long()]
    return live & (owners >= 0)


def check_live(state: CacheState, live_host_slots: Tensor) -> None:
    """Raise CacheInvariantError where a resident row belongs to no live host slot."""
    resident = state.device_to_host >= 0
    stale = (resident & ~live_slots(state, live_host_slots)).nonzero()
    if stale.shape[0]:
        layer, slot = stale[0].tolist()
        raise CacheInvariantError(
            f"{stale.shape[0]} resident rows belong to no live host slot, the first in"
            f" layer {layer}, device slot {slot}, host slot"
            f" {int(state.device_to_host[layer, slot])}"
        )


def check_rows(state: CacheState, host_rows: Tensor, device_rows: Tensor) -> None:
    """Raise CacheInvariantError unless resident rows are byte-equal to their host rows.

    Args:
        state: the cache's.
        host_rows: [L, N_H, row_bytes] uint8.
        device_rows: [L, N_G, row_bytes] uint8.
    """
    for layer in range(state.num_layers):
        owners = state.device_to_host[layer]
        slots = (owners >= 0).nonzero().squeeze(1)
        truth = host_rows[layer][owners[slots].long().to(host_rows.device)]
        differs = (device_rows[layer][slots].to(host_rows.device) != truth).any(dim=1)
        if bool(differs.any()):
            slot = int(slots[differs.nonzero()[0]])
            raise CacheInvariantError(
                f"layer {layer}: {int(differs.sum())} resident rows differ from their host"
                f" rows, the first in device slot {slot}, host slot {int(owners[slot])}"
            )


def require_room(what: str, rows: int, capacity: int) -> None:
    """Raise CapacityError where one cache step would need more device slots than a layer has.

    Args:
        what: needs them, in words.
        rows: how many.
        capacity: device slots a layer.
    """
    if rows > capacity:
        raise CapacityError(
            f"{what} in one cache step needs {rows} device slots, the device pool has {capacity} a"
            " layer (--device-pool-tokens)"
        )


def check_room(totals: Tensor, capacity: int) -> None:
    """Raise CacheInvariantError where an absent row got no device slot: a caller asked too much.

    Args:
        totals: [L, TOTALS] int64, of everything that took rows in.
        capacity: device slots a layer.
    """
    short = totals[:, RECALLED] + totals[:, WRITTEN] - totals[:, ALLOCATED]
    if bool((short != 0).any()):
        layer = int(short.nonzero()[0])
        raise CacheInvariantError(
            f"layer {layer}: {int(short[layer])} rows found no device slot since start: the"
            f" rows of one step exceeded the device pool of {capacity}"
        )
