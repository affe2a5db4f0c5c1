"""Two kinds of address, kept apart by type.

A host slot is a token's address everywhere; a device slot says where a row sits in one layer's
device pool and means nothing outside `echokv.cache` and the attention that reads it. Both are
int32 tensors with -1 for "none"; the types exist so that mypy catches one used as the other.
"""

from typing import NewType

from torch import Tensor

HostSlots = NewType("HostSlots", Tensor)
DeviceSlots = NewType("DeviceSlots", Tensor)

BLOCK_TOKENS = 64
"""Tokens of one host block, of one index-key page and of one prefix-cache hash."""

NO_SLOT = -1


def blocks_for(tokens: int) -> int:
    """Blocks of 64 that so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)
