import sys
sys.path.insert(0, "benchmarks/device"); sys.path.insert(0, "lab")
import torch, statistics
from dataclasses import replace
from torch.profiler import profile, ProfilerActivity
import prefetch as bench
device = torch.device("cuda")
shapes = [(1, 98304), (2, 98304), (13, 32768), (13, 98304)]
sizes = replace(bench.REAL, layers=3, repeats=1, hits=(0.5,), batches=(1, 2, 13), contexts=(32768, 98304))
world = bench.World(sizes, "cuda", "fp8_ds_mla", device)
g = torch.Generator(device=device).manual_seed(5)
def name(k): 
    for n in ("quantise_query", "prefetching_64", "index_scores_64", "fetch_listed", "topk", "make_resident", "make_many", "choose_victims"):
        if n in k: return n
    return None
for batch, context in shapes:
    case = bench.Case(world, batch, context)
    case.prepare(0.5, "perfect", g)
    graphs = {"off": bench.graphs_of(case, world.plain)}
    case.prepare(0.5, "perfect", g)
    graphs["on"] = bench.graphs_of(case, world.ahead)
    for hit in (0.5, 0.9):
        for kind, which in (("off", "off"), ("perfect", "on"), ("recorded", "on")):
            replay, results, finish = graphs[which]
            rows = []
            for r in range(5):
                case.prepare(hit, "recorded" if kind == "recorded" else "perfect", g)
                bench.recall_limits(world.predictions, None)
                world.flush.zero_(); torch.cuda.synchronize()
                with profile(activities=[ProfilerActivity.CUDA]) as p:
                    replay(); torch.cuda.synchronize()
                ev = [(e.name, e.time_range.start, e.time_range.end) for e in p.events() if e.device_type.name == "CUDA" and name(e.name)]
                ev.sort(key=lambda e: e[1])
                q = [i for i, e in enumerate(ev) if "quantise" in e[0]]
                if len(q) < 3: continue
                lay = [e for e in ev if ev[q[1]][1] <= e[1] < ev[q[2]][1]]
                t0 = lay[0][1]
                rows.append({name(e[0]): (e[1] - t0, e[2] - t0) for e in lay} | {"next": (ev[q[2]][1] - t0,) * 2})
            if not rows: print("no events"); continue
            out = []
            for n in rows[0]:
                a = statistics.median(x[n][0] for x in rows if n in x); b = statistics.median(x[n][1] for x in rows if n in x)
                out.append(f"{n} {a:.1f}-{b:.1f}")
            print(f"{batch} x {context} {hit} {kind:<9}", "  ".join(out), flush=True)
    del case, graphs
