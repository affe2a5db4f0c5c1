"""What a decode benchmark says: a dictionary for JSON, and tables to read."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from echokv.bench.decode import StepTimer, cache_figures, spread
from echokv.bench.decode_engine import DecodeEngine, LoadedModel
from echokv.bench.decode_replay import ReplaySelector
from echokv.kernels.protocol import Kernels


def run_figures(loaded: LoadedModel, preset: str) -> dict[str, Any]:
    """What all variants of a run share."""
    config, engine = loaded.config, loaded.engine_config
    return {
        "preset": preset,
        "layers": config.num_hidden_layers,
        "dense_layers": config.mlp_layer_types.count("dense"),
        "experts": config.n_routed_experts,
        "backend": loaded.kernels.name,
        "kernels": _who_serves(loaded.kernels),
        "dtype": engine.dtype,
        "weights": "bf16" if config.quant_block_size is None else "fp8",
        "kv_cache_dtype": engine.kv_cache_dtype,
        "index_key_dtype": engine.index_key_dtype,
        "weight_bytes": loaded.nbytes,
        "weights_s": loaded.seconds,
    }


def _who_serves(kernels: Kernels) -> dict[str, str]:
    """The project or folder that each large part of a step comes from."""
    own = {part: getattr(kernels, op).__module__.split(".")[2] for part, op in _LARGE.items()}
    if kernels.library_mla is not None:
        own["attention"] = "flashmla"
    if kernels.scheduled_scores is not None:
        own["index scores"] = "deepgemm"
    return own


_LARGE = {
    "attention": "sparse_mla",
    "index scores": "index_scores",
    "top-k": "topk",
    "fp8 products": "fp8_linear",
    "fp8 experts": "fp8_experts",
}


def variant_figures(decode: DecodeEngine) -> dict[str, Any]:
    """One engine's sizes and what its start-up took."""
    plan, sizes = decode.engine.plan, decode.sizes
    kinds = ("device pool", "index keys", "metadata")
    selector = decode.selector
    return {
        "offload": sizes.offload,
        "batch": sizes.batch,
        "selections": selector.description
        if isinstance(selector, ReplaySelector)
        else "real indexer",
        "host_pool_tokens": plan.host_slots if sizes.offload else None,
        "device_pool_tokens": plan.device_slots,
        "hbm_bytes": {kind: plan.nbytes(kind) for kind in kinds},
        "kv_hbm_bytes": sum(plan.nbytes(kind) for kind in kinds),
        "host_pool_bytes": plan.nbytes("host pool"),
        "startup_s": decode.seconds,
        "pools_s": decode.seconds["allocating the pools"],
    }


def step_figures(timer: StepTimer) -> dict[str, Any]:
    """Step times and rows of one variant."""
    batch, step = timer.decode.sizes.batch, spread(timer.step_ms)
    return {
        "step_ms": step,
        "device_step_ms": spread(timer.device_ms),
        "tokens_per_s": batch / step["median"] * 1e3,
        "steps": timer.steps,
        **cache_figures(timer.before, timer.after),
    }


def ratios(variants: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Offloaded against resident, where both ran: above 1 is slower for times."""
    if {"offloaded", "resident"} - variants.keys():
        return {}
    offloaded, resident = variants["offloaded"], variants["resident"]
    found: dict[str, float] = {}
    for key in ("step_ms", "device_step_ms"):
        if key in offloaded:
            found[key] = offloaded[key]["median"] / resident[key]["median"]
    if "output_tokens_per_s" in offloaded:
        found["output_tokens_per_s"] = (
            offloaded["output_tokens_per_s"] / resident["output_tokens_per_s"]
        )
    return found


def render(result: dict[str, Any], console: Console) -> None:
    """Print a result: one column a variant."""
    variants: dict[str, dict[str, Any]] = result["variants"]
    title = (
        f"{result['preset']}: {result['layers']} layers ({result['dense_layers']} dense),"
        f" {result['experts']} experts, {result['dtype']},"
        f" {result['weights']} weights of {result['weight_bytes'] / 1e9:.1f} GB"
    )
    table = Table(title=title)
    table.add_column("")
    for name in variants:
        table.add_column(name, justify="right")
    for label, show in _ROWS:
        cells = [show(one) for one in variants.values()]
        if any(cells):
            table.add_row(label, *cells)
    console.print(table)
    for key, ratio in result["ratio"].items():
        console.print(f"offloaded / resident, {key}: {ratio:.3f}")


def _times(key: str) -> Any:
    def show(variant: dict[str, Any]) -> str:
        if key not in variant:
            return ""
        times = variant[key]
        return f"{times['median']:.3f} ({times['p10']:.3f} to {times['p90']:.3f})"

    return show


def _number(key: str, fmt: str) -> Any:
    return lambda variant: format(variant[key], fmt) if variant.get(key) is not None else ""


def _hit_rates(variant: dict[str, Any]) -> str:
    rates = [rate for rate in variant["hit_rate_by_layer"] if rate is not None]
    if not rates:
        return ""
    return f"{sum(rates) / len(rates):.4f} ({min(rates):.4f} to {max(rates):.4f})"


def _recalled(variant: dict[str, Any]) -> str:
    rows: Sequence[int] = variant["recalled_rows_by_layer"]
    return f"{sum(rows) / len(rows) / variant['steps']:.1f}"


def _bytes(variant: dict[str, Any]) -> str:
    return ", ".join(f"{kind} {n / 1e9:.2f}" for kind, n in variant["hbm_bytes"].items())


_ROWS: tuple[tuple[str, Any], ...] = (
    ("selections", lambda variant: variant["selections"]),
    ("requests at once", _number("batch", "d")),
    ("step, ms (10th to 90th)", _times("step_ms")),
    ("on the device alone, ms", _times("device_step_ms")),
    ("tokens/s", _number("tokens_per_s", ".1f")),
    ("output tokens/s", _number("output_tokens_per_s", ".1f")),
    ("hit rate, mean (layers)", _hit_rates),
    ("rows recalled a layer a step", _recalled),
    ("device pool, tokens a layer", _number("device_pool_tokens", ",d")),
    ("host pool, tokens", _number("host_pool_tokens", ",d")),
    ("HBM for KV, GB", _bytes),
    ("pools allocated, s", lambda variant: f"{variant['pools_s']:.1f}"),
)
