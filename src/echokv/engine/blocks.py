"""Host blocks: who holds which, and which still hold a prefix worth keeping.

Blocks of 64 host slots, reference counted; full blocks are found again by the hash of all tokens
up to their end. Integers only: rows live in `echokv.cache`. A block that is handed out again must
first be made absent from every layer: `take_stale` names those blocks, the engine releases them
before the next forward pass.
"""

from collections import OrderedDict
from collections.abc import Sequence


class HostBlocks:
    """The allocator of host blocks with a prefix cache.

    A block is free (no holder, no hash), cached (no holder, but a hash that can be found: evicted
    least recently used first) or held (by one or more requests).

    Args:
        num_blocks: blocks in the host pool.
        enable_prefix_caching: False never keeps a block without a holder.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self._enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._stale: list[int] = []

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks kept by the prefix cache alone."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks held by requests."""
        return self.num_blocks - self.num_available

    def held(self) -> list[int]:
        """Block ids held by requests."""
        return [block for block, holders in enumerate(self._holders) if holders]

    def cached(self) -> list[int]:
        """Block ids kept by the prefix cache alone, least recently used first."""
        return list(self._cached)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix, in order; they are not yet held."""
        found = []
        if self._enable_prefix_caching:
            for digest in hashes:
                block = self._block_of.get(digest)
                if block is None:
                    break
                found.append(block)
        return found

    def num_available_beside(self, blocks: Sequence[int]) -> int:
        """Blocks that `allocate` could still hand out after `hold(blocks)`."""
        return self.num_available - sum(1 for block in blocks if block in self._cached)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that `find_prefix` found."""
        for block in blocks:
            self._cached.pop(block, None)
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, one holder each.

        The caller has compared `count` with `num_available`.
        """
        assert count <= self.num_available
        blocks = [self._pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each block of a request, given in order of position.

        Later blocks become evictable first, so that a shared prefix outlives its continuations.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0
            if self._holders[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
                    self._stale.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Make a held block, whose rows are all written, findable by its hash.

        Where two requests computed the same block, the first one registered stays.
        """
        if self._enable_prefix_caching and digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def take_stale(self) -> list[int]:
        """Blocks whose rows must be made absent from every layer before the next forward pass."""
        stale, self._stale = self._stale, []
        return stale

    def _pop(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        self._stale.append(block)
        return block
