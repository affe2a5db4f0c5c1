"""The CUDA C++ kernels at small sizes, to be run under compute-sanitizer.

    export SANITIZE="compute-sanitizer --error-exitcode 1 --report-api-errors no"
    $SANITIZE --tool memcheck python benchmarks/device/sanitize.py
    $SANITIZE --tool racecheck python benchmarks/device/sanitize.py

(cuda-bindings asks the driver for functions that it may not have, which memcheck would report.)

Every kernel of `kernels/cuda/{recall,append,victims,topk,index_scores,fetch_listed}.cu` and of
prefill_scores.cu runs over the cases that differ in code: rows of 16-byte words and others, tiles
that wait in device_slots, lists that last and lists made anew, clusters of one and of eight, parts
of a row in registers, in shared memory and read again, 32 and 64 heads. The tools run one kernel at
a time, so what the scores list is fetched after them here. Results are compared with the plain
Python model, so that what the tools watched was right.
"""

import argparse
import random
import sys
import time

import torch
from tests.kernels import test_cuda_inter
from tests.kernels.cache_model import layer_in_use
from tests.kernels.inter_model import InterCase
from tests.kernels.prefetch_model import make_case
from tests.kernels.resident_model import LayerUnderTest, selection
from tests.kernels.test_cuda_prefetch import OnGpu

from echokv.kernels.cuda import fused, recall, topk
from echokv.kernels.reference.name_rows import name_rows

CUDA = torch.device("cuda")
PARTS = ("cache", "topk", "prefetch", "prefill")


def check_resident(
    row_bytes: int, rows: int, k: int, lanes: int | None, *, beside: bool = False
) -> None:
    """Victims, append and make_resident of one layer through three steps."""
    rng = random.Random(row_bytes * rows)
    floor, slots = 4096, 600
    under_test = LayerUnderTest(layer_in_use(rng, slots, 1200, 0.8, floor), CUDA, row_bytes)
    for step in range(3):
        if step == 0:
            under_test.choose(fused, floor)
        else:  # the list that is left, or a new one, as it finds
            under_test.begin(fused, floor, 200)
        under_test.append(fused, [-1, *rng.sample(range(1200), 40)], floor)
        wanted = selection(rng, rng.sample(range(1200), 250), rows, k)
        new = rng.sample(range(1200), 20) if step else None
        under_test.fetch(
            fused, wanted, torch.randn(wanted.shape), floor, lanes=lanes, new=new, beside=beside
        )
        floor += 8


def check_gather(row_bytes: int) -> None:
    """The recall op."""
    host_rows = torch.randint(0, 256, (300, row_bytes), dtype=torch.uint8).pin_memory()
    device_rows = torch.zeros((200, row_bytes), dtype=torch.uint8, device=CUDA)
    sources = torch.randperm(300)[:150].to(torch.int32)
    targets = torch.randperm(200).to(torch.int32)
    count = torch.tensor([140], dtype=torch.int32, device=CUDA)
    recall.recall(sources.to(CUDA), count, targets.to(CUDA), host_rows, device_rows)
    found = device_rows[targets[:140].long().to(CUDA)].cpu()
    assert torch.equal(found, host_rows[sources[:140].long()])


def check_topk(rows: int, width: int, k: int, *, zeros: bool = False) -> None:
    """One shape, with a short row, ties and garbage past the lengths; zeros overflow every list."""
    scores = torch.zeros(rows, width) if zeros else torch.randn(rows, width).round(decimals=1)
    lens = [width, k - 1, k, width - 1][:rows] + [width] * max(0, rows - 4)
    for row, length in enumerate(lens):
        scores[row, length:] = torch.nan
    context = torch.tensor(lens, dtype=torch.int32, device=CUDA)
    tables = torch.randperm(2 * (width // 64 + 1)).to(CUDA, torch.int32).view(2, -1)
    owners = torch.arange(rows, dtype=torch.int32, device=CUDA) % 2
    positions, _, *named = topk.topk_rows(scores.to(CUDA), context, k, owners, tables)
    assert torch.equal(positions, topk.topk(scores.to(CUDA), context, k)[0])
    for got, want in zip(named, name_rows(positions, scores.to(CUDA), owners, tables), strict=True):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    for row, length in enumerate(lens):
        order = torch.sort(scores[row, :length] + 0.0, descending=True, stable=True).indices
        want = order[:k].sort().values.to(torch.int32)
        assert torch.equal(positions[row, : len(want)].cpu(), want), (rows, width, k, row)


def check_prefetch(row_bytes: int, heads: int) -> None:
    """Scores that list candidates, and then those that fetch them, twice over one layer."""
    rng = random.Random(heads)
    under_test = LayerUnderTest(layer_in_use(rng, 900, 64 * 60, 0.8, 4096), CUDA, row_bytes)
    on_gpu = OnGpu(make_case(rng, under_test, [900, 0, 700, 64, 1], 3), heads, late=True)
    on_gpu.case.limits[on_gpu.case.request_slots[3]] = 0
    on_gpu.set_thresholds(0.2)
    assert on_gpu.prefetch(60, 0, 60)
    on_gpu.prefetch(20, 65536 // 100, 2)


def check_prefill(row_bytes: int, heads: int) -> None:
    """Scores in tiles, and with rows moving, early and late; some find no place."""
    rng = random.Random(heads)
    chunks = [(700, 70), (70, 1), (129, 9), (64, 64)]
    for most in (2000, 20):
        under_test = test_cuda_inter.in_use(rng, 2000, 60, row_bytes)
        case = InterCase(under_test, chunks, rng, shared=1)
        on_gpu = test_cuda_inter.OnGpu(case, heads)  # makes plain scores
        assert on_gpu.prefetch(60, most)


def main() -> int:
    """Run everything; an assertion or the sanitizer says what is wrong."""
    parser = argparse.ArgumentParser(description="Kernels to be run under compute-sanitizer.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parts = parser.parse_args().parts
    torch.manual_seed(3)
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{what}: {time.perf_counter() - start:.1f} s", flush=True)

    for row_bytes in (656, 40) if "cache" in parts else ():
        check_resident(row_bytes, 4, 130, None)
        check_resident(row_bytes, 3, 33, 32)
        check_resident(row_bytes, 16, 300, None, beside=True)
        check_gather(row_bytes)
        say(f"rows of {row_bytes} B")
    if "cache" in parts:
        for beside in (False, True):
            check_resident(656, 300, 70, 4, beside=beside)  # more tiles than resident blocks
    for shape in ((4, 5000, 300), (4, 63, 7), (2, 20_000, 1000)) if "topk" in parts else ():
        check_topk(*shape)
        check_topk(*shape, zeros=True)
        say(f"topk {shape}")
    for row_bytes, heads in ((656, 64), (1152, 32)):
        if "prefetch" in parts:
            check_prefetch(row_bytes, heads)
            say(f"prefetch, {heads} heads")
        if "prefill" in parts:
            check_prefill(row_bytes, heads)
            say(f"prefill, {heads} heads")
    torch.cuda.synchronize()
    print("all as the models say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
