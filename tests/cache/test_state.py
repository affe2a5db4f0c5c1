"""The state's sizes, its views, and that `check` sees what is broken."""

import pytest
import torch

from echokv.cache.state import CacheInvariantError, CacheState

CPU = torch.device("cpu")


def healthy() -> CacheState:
    """Two layers of 5 device and 9 host slots; layer 1 holds host slots 7 and 0."""
    state = CacheState.create(2, 5, 9, CPU)
    for device_slot, host_slot in ((3, 7), (0, 0)):
        state.device_free[1, device_slot] = 0
        state.priority[1, device_slot] = 4
        state.device_to_host[1, device_slot] = host_slot
        state.host_to_device[1, host_slot] = device_slot
    return state


def test_a_new_state_and_a_used_one_are_sound() -> None:
    CacheState.create(3, 1, 64, CPU).check()
    healthy().check()


@pytest.mark.parametrize(("device_slots", "host_slots"), [(1, 64), (200, 1856), (1000, 64)])
def test_metadata_is_the_papers_size(device_slots: int, host_slots: int) -> None:
    state = CacheState.create(2, device_slots, host_slots, CPU)
    assert state.metadata_bytes_per_layer == 4 * host_slots + 13 * device_slots


def test_layers_are_views() -> None:
    state = healthy()
    state.layer(1).priority[3] = 99
    assert state.priority[1].tolist() == [4, -1, -1, 99, -1]
    assert state.priority[0].tolist() == [-1] * 5


BREAKAGES = {
    "host map lost": ("host_to_device", (1, 7), -1, r"layer 1.*\[3\]"),
    "device map lost": ("device_to_host", (1, 3), -1, r"layer 1.*\[7\]"),
    "two claim one": ("host_to_device", (1, 4), 3, r"layer 1.*\[4\]"),
    "claim left behind": ("host_to_device", (0, 4), -6, r"layer 0.*range.*\[4\]"),
    "host slot too large": ("device_to_host", (1, 3), 9, r"layer 1.*range.*\[3\]"),
    "device slot too large": ("host_to_device", (1, 7), 5, r"layer 1.*range.*\[7\]"),
    "free but held": ("device_free", (1, 3), 1, r"layer 1.*disagree.*\[3\]"),
    "held by nobody": ("device_free", (0, 2), 0, r"layer 0.*disagree.*\[2\]"),
    "free with a priority": ("priority", (0, 2), 5, r"layer 0.*disagree.*\[2\]"),
    "held without a priority": ("priority", (1, 0), -1, r"layer 1.*disagree.*\[0\]"),
    "negative priority": ("priority", (1, 0), -8, r"layer 1.*disagree.*\[0\]"),
    "neither free nor not": ("device_free", (0, 1), 2, r"layer 0.*disagree.*\[1\]"),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_check_names_what_is_broken(name: str) -> None:
    tensor, place, value, message = BREAKAGES[name]
    state = healthy()
    getattr(state, tensor)[place] = value
    with pytest.raises(CacheInvariantError, match=message):
        state.check()
