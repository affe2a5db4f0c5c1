"""Timing in turns: what runs in between, in which order, and how long each takes.

For scripts that compare sides which read the same host memory: whoever goes second would otherwise
find in the caches what the first has left there.
"""

import statistics
from collections.abc import Callable, Iterable

import torch

import cache as common  # benchmarks/device/cache.py
from echokv.kernels.cuda import recall
from echokv.memory.pools import HostPool

STEPS = {"pinned": 2**17, "managed": 2**21}
"""Bytes of host memory that a GPU maps as one page, by kind of memory."""


class Others:
    """What the other layers of a model leave behind: an L2 cache and translations of theirs.

    Args:
        row_bytes: of the host rows.
    """

    def __init__(self, row_bytes: int) -> None:
        device = torch.device("cuda")
        self._bytes = torch.empty(2**28, dtype=torch.uint8, device=device)
        self._row_bytes = row_bytes
        # By kind of memory, how much of it a GPU's translation covers (performance.md).
        self._reads = [self._read_of(kind, step) for kind, step in STEPS.items()]

    def _read_of(self, kind: str, step: int) -> Callable[[], None]:
        slots = 2**32 // self._row_bytes // 64 * 64
        host = HostPool(1, slots, self._row_bytes, self._bytes.device, kind)
        sources = torch.arange(0, slots, step // self._row_bytes, device=self._bytes.device).int()
        count = torch.tensor([len(sources)], dtype=torch.int32, device=sources.device)
        targets = torch.arange(len(sources), device=sources.device).int()
        landed = self._bytes[: len(sources) * self._row_bytes].view(-1, self._row_bytes)
        return lambda: recall.recall(sources, count, targets, host.rows[0], landed)

    def __call__(self) -> None:
        """Overwrite L2, and read from every page of 4 GiB of host memory of each kind."""
        self._bytes.zero_()
        for read in self._reads:
            read()


def order(names: Iterable[str], round_: int) -> list[str]:
    """Who goes when in a round: another first in each, in both directions."""
    ordered = list(names)
    first = round_ // 2 % len(ordered)
    turned = ordered[first:] + ordered[:first]
    return turned[::-1] if round_ % 2 else turned


def spread(taken: list[float]) -> dict[str, float]:
    """Median, percentiles and mean."""
    return common.spread(taken) | {"mean": statistics.fmean(taken)}


def in_turns(
    runs: dict[str, Callable[[], object]],
    prepare: Callable[[], None],
    others: Callable[[], None],
    repeats: int,
    share: int,
) -> dict[str, dict[str, float]]:
    """Each run's graph, in microseconds divided by `share`; every round has one `prepare`."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            prepare()
            for run in runs.values():
                run()
    torch.cuda.current_stream().wait_stream(stream)
    for name, run in runs.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    for round_ in range(-2, repeats):
        prepare()
        for name in order(graphs, round_):
            others()
            us = common.clock(graphs[name].replay, torch.device("cuda"))
            if round_ >= 0:
                samples[name].append(us / share)
    return {name: spread(taken) for name, taken in samples.items()}
