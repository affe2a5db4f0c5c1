"""HostBlocks against a plain model: no block has two owners, stale blocks are always reported."""

import random

from echokv.engine.blocks import HostBlocks


def digests(count: int, salt: str = "") -> list[bytes]:
    return [f"{salt}{index}".encode() for index in range(count)]


def test_allocate_hands_out_each_block_once() -> None:
    blocks = HostBlocks(5, enable_prefix_caching=True)
    first, second = blocks.allocate(3), blocks.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (blocks.num_available, blocks.num_held, blocks.num_cached) == (0, 5, 0)


def test_a_prefix_is_found_until_its_block_is_evicted() -> None:
    blocks = HostBlocks(3, enable_prefix_caching=True)
    hashes = digests(2)
    held = blocks.allocate(2)
    for block, digest in zip(held, hashes, strict=True):
        blocks.register(block, digest)
    blocks.release(held)
    assert blocks.find_prefix([*hashes, b"other"]) == held
    assert blocks.num_cached == 2
    assert blocks.take_stale() == []  # cached rows may stay resident

    # The free block goes first, then the later block of the prefix, then the earlier one.
    taken = blocks.allocate(2)
    assert held[1] in taken and held[0] not in taken
    assert blocks.find_prefix(hashes) == held[:1]
    assert blocks.take_stale() == [held[1]]


def test_sharing_keeps_a_block_until_its_last_holder_leaves() -> None:
    blocks = HostBlocks(2, enable_prefix_caching=True)
    held = blocks.allocate(1)
    blocks.register(held[0], b"x")
    blocks.hold(blocks.find_prefix([b"x"]))
    blocks.release(held)
    assert blocks.num_held == 1
    blocks.release(held)
    assert (blocks.num_held, blocks.num_cached) == (0, 1)


def test_the_first_of_two_equal_blocks_stays_findable() -> None:
    blocks = HostBlocks(2, enable_prefix_caching=True)
    one, two = blocks.allocate(2)
    blocks.register(one, b"x")
    blocks.register(two, b"x")
    blocks.release([two])
    assert blocks.take_stale() == [two]
    assert blocks.find_prefix([b"x"]) == [one]


def test_without_prefix_caching_every_released_block_is_stale() -> None:
    blocks = HostBlocks(2, enable_prefix_caching=False)
    held = blocks.allocate(2)
    blocks.register(held[0], b"x")
    blocks.release(held)
    assert blocks.find_prefix([b"x"]) == []
    assert sorted(blocks.take_stale()) == sorted(held)
    assert blocks.num_available == 2


def test_available_beside_counts_cached_blocks_that_would_be_held() -> None:
    blocks = HostBlocks(2, enable_prefix_caching=True)
    held = blocks.allocate(1)
    blocks.register(held[0], b"x")
    blocks.release(held)
    assert blocks.num_available == 2
    assert blocks.num_available_beside(held) == 1


def test_random_use_never_loses_or_doubles_a_block() -> None:
    rng = random.Random(0)
    blocks = HostBlocks(12, enable_prefix_caching=True)
    owners: dict[int, list[int]] = {}
    reported: set[int] = set()
    ever_written: set[int] = set()
    for step in range(3000):
        if owners and rng.random() < 0.45:
            blocks.release(owners.pop(rng.choice(list(owners))))
        else:
            chain = digests(rng.randint(1, 4), salt=str(rng.randint(0, 3)))
            prefix = blocks.find_prefix(chain)
            fresh_count = len(chain) - len(prefix)
            if fresh_count > blocks.num_available_beside(prefix):
                continue
            blocks.hold(prefix)
            fresh = blocks.allocate(fresh_count)
            reported |= set(blocks.take_stale())
            # Whoever gets a block that was written before must have been told to release it.
            assert not (set(fresh) & ever_written) - reported
            reported -= set(fresh)
            ever_written |= set(fresh)
            owners[step] = prefix + fresh
            if rng.random() < 0.7:
                for block, digest in zip(owners[step], chain, strict=True):
                    blocks.register(block, digest)
        held = {block for owned in owners.values() for block in owned}
        assert held == set(blocks.held())
        assert blocks.num_held + blocks.num_available == 12
