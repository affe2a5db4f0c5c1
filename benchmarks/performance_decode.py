"""Tables of docs/performance.md about decoding at full scale (`decode.py`)."""

from typing import Any

from performance_tables import (
    Row,
    decode_case,
    decode_files,
    load,
    number,
    variants,
)

from echokv.bench.markdown import table

TOPK = 2048
SIDES = ("resident", "offloaded")
SHAPES = {
    "offload": "13 x 32,768",
    "few-misses": "13 x 32,768, three rows a request missing",
    "offload-inline": "13 x 32,768, recall inline",
    "paper-rates": "13 x 32,768, the paper's rates",
    "light": "1 x 4,096",
}


def steps() -> str:
    """Step times of both sides, and what their KV takes."""
    lines = []
    for case, shape in SHAPES.items():
        sides = variants(case)
        for side in SIDES:
            if side not in sides:
                continue
            one = sides[side]
            taken = one["step_ms"]
            base = sides.get("resident") or variants("offload").get("resident")
            ratio = None if base is None else taken["median"] / base["step_ms"]["median"]
            recalled = sum(one["recalled_rows_by_layer"]) / len(one["recalled_rows_by_layer"])
            hbm = " + ".join(f"{size / 1e9:.2f}" for size in one["hbm_bytes"].values())
            lines.append((
                shape, side, f"{taken['median']:.2f} ({taken['p10']:.2f} to {taken['p90']:.2f})",
                f"{one['device_step_ms']['median']:.2f}",
                "" if side == "resident" else number(ratio, ".3f"),
                f"{recalled / one['steps']:,.0f}", hbm,
            ))  # fmt: skip
    header = ("batch x context", "KV", "step, ms (10th to 90th percentile)", "on the device, ms",
              "to resident", "rows recalled a layer a step",
              "HBM, GB: rows + index keys + metadata")  # fmt: skip
    return table(header, lines, words=2)


def throughput() -> str:
    """Both sides at equal bytes of HBM."""
    return _throughput("equal-bytes", "budget")


def row_pools() -> str:
    """Both sides at equal row pools."""
    return _throughput("equal-rows", "rows on the device")


def _throughput(case: str, what: str) -> str:
    pools = decode_case(case)
    lines = []
    for name in sorted(pools, key=lambda name: -float(name.split()[0])):
        sides = pools[name].get("variants", {})
        for side in SIDES:
            if side in sides:
                ratio = pools[name]["ratio"].get("output_tokens_per_s")
                lines.append(_throughput_row(name, side, sides[side], ratio))
    header = (what, "KV", "HBM used, GB", "requests", "tokens each", "output tokens/s",
              "to resident", "ms a step", "hit rate", "less a cold first step")  # fmt: skip
    return table(header, lines, words=2) if lines else "Not measured."


def _throughput_row(name: str, side: str, one: Row, ratio: float | None) -> tuple[Any, ...]:
    selected, recalled = (sum(one[f"{what}_rows_by_layer"]) for what in ("selected", "recalled"))
    cold = one["batch"] * TOPK * len(one["selected_rows_by_layer"])
    size, unit = name.split()
    return (
        f"{float(size):,g} {unit}", side, f"{one['kv_hbm_bytes'] / 1e9:.2f}", one["batch"],
        one["output_tokens"] // one["batch"], one["output_tokens_per_s"],
        f"{ratio:.2f}" if ratio and side == "offloaded" else None,
        f"{one['median_step_ms']:.1f}",
        f"{1 - recalled / selected:.3f}" if selected and side == "offloaded" else None,
        f"{1 - (recalled - cold) / (selected - cold):.3f}"
        if selected > cold and side == "offloaded" else None,
    )  # fmt: skip


def weights() -> str:
    """What the step's weights are, and how long one read of them takes."""
    model = load("decode-h200")["model"]
    rows = [row for row in load("library_kernels")["timings"] if row["op"] == "fp8_experts"]
    rate = next(row["gb_per_s"] for row in rows if "tokens 13" in row["case"])
    size = model["weight_bytes"] / 1e9
    return (
        f"The weights are {size:.1f} GB of {model['layers']} layers. At {rate / 1e3:.2f} TB/s, what"
        f" the experts' products of 13 tokens reach below, one read of all of them takes"
        f" {size / rate * 1e3:.1f} ms."
    )


def pinned() -> list[tuple[object, ...]]:
    """Rows of the pinning table: what engines of the whole model took, and shared memory."""
    lines: list[tuple[object, ...]] = []
    for name in decode_files():
        report = load(name)
        for case in ("offload", "offload-inline"):
            one = report.get(case, {}).get("variants", {}).get("offloaded")
            if one is not None:
                what = f"the engine's pools, device pool too ({case})"
                size = f"{one['host_pool_bytes'] / 2**30:.1f} GiB"
                lines.append((size, what, one["pools_s"], f"{name}.json"))
        shared = {
            (one["pinned_bytes"], one["pinned_s"])
            for case in ("equal-bytes", "equal-rows")
            for one in report.get(case, {}).values()
            if "pinned_s" in one
        }
        lines += [
            (f"{size / 2**30:.1f} GiB", "a host pool alone", taken, f"{name}.json")
            for size, taken in sorted(shared)
        ]
    return lines


def ratios(case: str, names: tuple[str, ...]) -> list[float | None]:
    """Output tokens/s, offloaded to resident, of a throughput case by pool."""
    pools = decode_case(case)
    return [pools.get(name, {}).get("ratio", {}).get("output_tokens_per_s") for name in names]


def tokens_each(case: str) -> set[int]:
    """Output tokens a request of the pools that were measured."""
    sides = [pool["variants"]["offloaded"] for pool in decode_case(case).values()
             if "variants" in pool]  # fmt: skip
    return {one["output_tokens"] // one["batch"] for one in sides}
