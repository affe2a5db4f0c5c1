import sys, time
sys.path.insert(0, "benchmarks/device")
import torch
from dataclasses import replace
import prefetch as bench
import echokv.kernels.cuda.build as build
from echokv.kernels.cuda import fetch_listed
BASE = build.OPTIONS
device = torch.device("cuda")
def use(options):
    build.OPTIONS = (*BASE, *options)
    fetch_listed.MODULE._functions.clear()
    for beside in (False, True): fetch_listed.MODULE.load(device, fetch_listed.KERNELS, beside=beside)
    build.OPTIONS = BASE
def main(variants, shapes, hits, repeats=5, layers=3):
    sizes = replace(bench.REAL, layers=layers, repeats=repeats, hits=hits, batches=tuple(b for b, _ in shapes), contexts=tuple(c for _, c in shapes))
    t0 = time.time()
    world = bench.World(sizes, "cuda", "fp8_ds_mla", device)
    print(f"world {time.time() - t0:.1f} s", flush=True)
    for batch, context in shapes:
        for name, options in variants:
            t0 = time.time(); use(options)
            case = bench.Case(world, batch, context)
            for one in bench.measure(case, hits):
                us = " ".join(f"{k} {v['median']:6.1f} ({one['speedup'][k]:.2f})" for k, v in one["us"].items())
                rows = " ".join(f"{k} {round(v['recalled'])}/{round(v['prefetched'])}/{round(v['useful'])}" for k, v in one["rows_a_layer"].items() if k != "off")
                print(f"{batch:>2} x {context:>6} {name:<14} {one['hit']:.2f} {us} | {rows}", flush=True)
            print(f"  {time.time() - t0:.1f} s", flush=True)
            del case
