"""When the kernels of a layer start and end in a decode step, stream by stream.

Knows the profiler's kernels and one name that every layer has once; nothing of engines.
"""

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from echokv.bench.decode_step import record_kernels

NAME_CHARS = 70
"""Of a kernel's name: templates go on for ever."""

Interval = tuple[str, int, float, float]
"""Kernel, stream, start and end in microseconds."""


@dataclass(frozen=True, kw_only=True)
class LayerKernel:
    """One kernel of a layer, medians over all layers that have it."""

    name: str
    stream: int
    start_us: float  # from the layer's start
    us: float  # how long
    layers: int  # that have it


def kernels_of(run: Callable[[], Any], steps: int) -> list[Interval]:
    """Every kernel of some steps on the GPU, by start.

    Args:
        run: one step.
        steps: how many.
    """
    found = [
        (event.name, event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in record_kernels(run, steps).events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel[2])


def layer_timeline(kernels: Sequence[Interval], anchor: str, first: str) -> list[LayerKernel]:
    """The kernels of a layer, in the order in which they start.

    Args:
        kernels: by start.
        anchor: part of the name of a kernel that each layer has once.
        first: part of the name of the first kernel of a layer, the last such one before its anchor.
    """
    anchors = [place for place, kernel in enumerate(kernels) if anchor in kernel[0]]
    begins = [_last(kernels, first, place) for place in anchors]
    seen: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    for begin, end in itertools.pairwise(begins):
        zero, numbers = kernels[begin][2], Counter[str]()
        for name, stream, start, stop in kernels[begin:end]:
            seen[name, numbers[name]].append((name, stream, start - zero, stop - start))
            numbers[name] += 1
    rows = [_median(name, times) for (name, _), times in seen.items()]
    common = [row for row in rows if row.layers > (len(anchors) - 1) // 2]
    return sorted(common, key=lambda row: row.start_us)


def _last(kernels: Sequence[Interval], name: str, place: int) -> int:
    return max((at for at in range(place) if name in kernels[at][0]), default=0)


def _median(name: str, times: Iterable[Interval]) -> LayerKernel:
    _, streams, starts, lasting = zip(*times, strict=True)
    return LayerKernel(
        name=re.sub(r"<.*|\(.*", "", name.removeprefix("void "))[:NAME_CHARS],
        stream=Counter(streams).most_common(1)[0][0],
        start_us=round(statistics.median(starts), 1),
        us=round(statistics.median(lasting), 1),
        layers=len(starts),
    )


def figures(rows: Iterable[LayerKernel]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(row) for row in rows]
