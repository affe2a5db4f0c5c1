"""A prompt longer than the device pool: chunked prefill of 100,000 tokens over 50,000 device slots.

    python benchmarks/device/prefill.py --output prefill.json                # on a GPU
    python benchmarks/device/prefill.py --small --output small.json          # anywhere

Few layers of DeepSeek-V3.2's shapes, random weights, the product's engine. The same prompt runs
offloaded, without and with prefetch, and resident; it counts only if all give the same tokens and,
byte for byte, the same rows: in host memory offloaded, in HBM resident. Then a chunk that ends a
cached prompt, whose rows are in the device pool or in host memory alone, without and with prefetch.
`--profile 8 30` lists the kernels of those steps, on a GPU. `--small` runs the same code at toy
sizes; its times mean nothing.
"""

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from echokv.bench import decode_report, report
from echokv.bench.decode_engine import LoadedModel, synchronise
from echokv.bench.decode_preset import preset_config
from echokv.bench.decode_step import kernel_times
from echokv.config import EngineConfig
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.outputs import RequestOutput
from echokv.engine.sampling_params import SamplingParams
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

PROFILED_KERNELS = 24
TURNS = 6


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the run."""

    preset: str
    layers: int
    dense_layers: int
    weights: str
    prompt: int
    device_pool: int
    chunk: int
    output: int = 8


REAL = Scale(
    preset="deepseek-v3.2-dp8-slice",
    layers=3,
    dense_layers=1,
    weights="fp8",
    prompt=100_000,
    device_pool=50_000,
    chunk=2048,
)
SMALL = Scale(
    preset="small",
    layers=2,
    dense_layers=1,
    weights="bf16",
    prompt=1000,
    device_pool=500,
    chunk=128,
)


VARIANTS: dict[str, dict[str, Any]] = {
    "offloaded": {"offload": True, "prefetch": "off"},
    "offloaded, prefetch on": {"offload": True, "prefetch": "on"},
    "resident": {"offload": False, "prefetch": "off"},
}


def main() -> int:
    """Run all ways, write JSON, say what differed; 1 when anything did."""
    options = _options()
    scale = SMALL if options.small else REAL
    if options.prompt:
        scale = dataclasses.replace(scale, prompt=options.prompt)
    raw = preset_config(
        scale.preset,
        num_layers=scale.layers,
        dense_layers=scale.dense_layers,
        weights=scale.weights,
    )
    with TemporaryDirectory(prefix="echokv-prefill-") as folder:
        config = EngineConfig(model=folder, backend=options.backend, seed=1)
        loaded = LoadedModel.make(raw, Path(folder), config)
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(
            loaded.config.vocab_size, (scale.prompt,), generator=generator
        ).tolist()
        figures, tokens, rows = {}, [], []
        for name, overrides in VARIANTS.items():
            figures[name], generated, written = prefill(
                loaded, scale, prompt, profiled=tuple(options.profile), **overrides
            )
            tokens.append(generated)
            rows.append(written)
            print(f"{name}: {figures[name]}", flush=True)
        same = {
            "tokens": all(one == tokens[0] for one in tokens),
            "rows": all(torch.equal(one, rows[0]) for one in rows),
        }
        cold = {}
        for prefetch in ("off", "on"):
            cold[prefetch] = cold_prefix(loaded, scale, prompt, prefetch)
            print(f"cold prefix, prefetch {prefetch}: {cold[prefetch]}", flush=True)
        result = report.environment(options.commit) | {
            "scale": dataclasses.asdict(scale),
            "model": decode_report.run_figures(loaded, scale.preset),
            "variants": figures,
            "cold_prefix": cold,
            "same": same,
        }
    report.write_json(options.output, result)
    print(f"same tokens: {same['tokens']}, same rows: {same['rows']}; wrote {options.output}")
    return 0 if all(same.values()) else 1


def prefill(
    loaded: LoadedModel,
    scale: Scale,
    prompt: list[int],
    *,
    offload: bool,
    prefetch: str,
    profiled: tuple[int, ...],
) -> tuple[dict[str, Any], list[int], Tensor]:
    """One prompt through an engine of its own; the kernels of some steps are printed.

    Returns:
        figures, the tokens that follow, and the prompt's rows [L, prompt, row_bytes] on the CPU.
    """
    longest = blocks_for(len(prompt) + scale.output) * BLOCK_TOKENS
    row_bytes = loaded.row_format.row_bytes * loaded.config.num_hidden_layers
    config = dataclasses.replace(
        loaded.engine_config,
        offload=offload,
        prefetch=prefetch,
        host_pool_gib=(longest * row_bytes + 0.5) / 2**30 if offload else None,
        device_pool_tokens=scale.device_pool if offload else longest,
        max_model_len=longest,
        max_num_seqs=1,
        max_num_batched_tokens=scale.chunk,
        enable_prefix_caching=False,
    )
    engine = Engine(config, hooks=EngineHooks(model=loaded.model))
    params = SamplingParams(max_tokens=scale.output, ignore_eos=True, temperature=0.0)
    engine.add_request("warm-up", prompt[: 2 * scale.chunk + 1], params)  # compiles
    while engine.has_work:
        engine.step()
    before = engine.cache.counters()
    engine.add_request("prompt", prompt, params)
    request = engine.scheduler.waiting[0]
    tokens: list[int] = []
    synchronise(loaded.device)
    start = time.perf_counter()
    first_token_s = blocks = None
    chunks: list[float] = []
    while engine.has_work:
        began = time.perf_counter()
        if len(chunks) in profiled:
            outputs = profiled_step(engine, f"chunk {len(chunks)}, {offload=}, {prefetch=}")
        else:
            outputs = engine.step()
        for output in outputs:
            tokens += output.token_ids
        chunks.append(time.perf_counter() - began)
        if request.block_ids:
            blocks = list(request.block_ids)
        if tokens and first_token_s is None:
            first_token_s = time.perf_counter() - start
    synchronise(loaded.device)
    engine.cache.check()
    assert first_token_s is not None and blocks is not None
    counters = engine.cache.counters()
    figures = {
        "first_token_s": first_token_s,
        "prompt_tokens_per_s": len(prompt) / first_token_s,
        "device_pool_tokens": engine.cache.capacity,
        "chunk_ms": [round(seconds * 1e3, 2) for seconds in chunks],
        **{
            f"{name}_rows_by_layer": [
                getattr(new, name) - getattr(old, name)
                for new, old in zip(counters, before, strict=True)
            ]
            for name in ("selected", "recalled", "evicted", "prefetched")
        },
    }
    rows = _rows(engine, loaded, blocks, len(prompt))
    engine.close()
    del engine
    gc.collect()
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    return figures, tokens, rows


def cold_prefix(
    loaded: LoadedModel, scale: Scale, prompt: list[int], prefetch: str
) -> dict[str, Any]:
    """Milliseconds of a chunk whose context is in the device pool, and of one in host memory alone.

    A prompt is prefilled, then again with another end, all but its last chunk being cached; then a
    second one that the pool doesn't hold beside it, and the first with yet another end.
    """
    length = scale.device_pool * 4 // 5 // BLOCK_TOKENS * BLOCK_TOKENS
    longest = length + scale.chunk + BLOCK_TOKENS
    row_bytes = loaded.row_format.row_bytes * loaded.config.num_hidden_layers
    config = dataclasses.replace(
        loaded.engine_config,
        offload=True,
        prefetch=prefetch,
        host_pool_gib=(8 * longest * row_bytes + 0.5) / 2**30,
        device_pool_tokens=scale.device_pool,
        max_model_len=longest,
        max_num_seqs=1,
        max_num_batched_tokens=scale.chunk,
        enable_prefix_caching=True,
    )
    engine = Engine(config, hooks=EngineHooks(model=loaded.model))
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)
    first, second = prompt[:length], prompt[-length:]
    taken: dict[str, list[float]] = {"warm": [], "cold": []}
    recalled: dict[str, list[int]] = {"warm": [], "cold": []}
    early: dict[str, list[int]] = {"warm": [], "cold": []}

    def run(name: str, ids: list[int]) -> float:
        start = time.perf_counter()
        engine.add_request(name, ids, params)
        while engine.has_work:
            engine.step()
        synchronise(loaded.device)
        return (time.perf_counter() - start) * 1e3

    for turn in range(TURNS):
        run(f"first {turn}", first)
        for number, kind in enumerate(taken):
            if kind == "cold":
                run(f"second {turn}", second)
            at = (2 * turn + number) * scale.chunk
            before = engine.cache.counters()
            ms = run(f"{kind} {turn}", first + prompt[at : at + scale.chunk - 1])
            rows = list(zip(engine.cache.counters(), before, strict=True))
            if turn:  # the first compiles
                taken[kind].append(ms)
                recalled[kind].append(sum(new.recalled - old.recalled for new, old in rows))
                early[kind].append(sum(new.prefetched - old.prefetched for new, old in rows))
    engine.close()
    return {"context": length, "ms": taken, "rows_recalled": recalled, "rows_prefetched": early}


def profiled_step(engine: Engine, what: str) -> Sequence[RequestOutput]:
    """A step whose kernels are listed; slower for it."""
    outputs: list[RequestOutput] = []
    times = kernel_times(lambda: outputs.extend(engine.step()), 1)
    print(f"{what}: {sum(us for _, us, _ in times):.0f} us of kernels")
    for kernel, us, count in times[:PROFILED_KERNELS]:
        print(f"{us:9.1f} us {count:7.0f} x {us / count:8.2f} us  {kernel[:80]}", flush=True)
    return outputs


def _rows(engine: Engine, loaded: LoadedModel, blocks: list[int], count: int) -> Tensor:
    starts = torch.tensor(blocks)[:, None] * BLOCK_TOKENS
    slots = (starts + torch.arange(BLOCK_TOKENS)).flatten()[:count]
    layers = range(loaded.config.num_hidden_layers)
    if engine.host_pool is not None:
        return engine.host_pool.rows[:, slots].clone()
    on_device = slots.to(loaded.device)
    return torch.stack([engine.cache.rows(layer)[on_device].cpu() for layer in layers])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="of the code that runs; default: the git checkout's")
    parser.add_argument("--small", action="store_true", help="toy sizes, for a CPU")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="steps to profile")
    parser.add_argument("--prompt", type=int, help="tokens; default: 100,000")
    parser.add_argument("--backend", default="auto", help="auto, reference, triton or cuda")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
