"""`echokv bench decode`: decoding at full model shapes, without a checkpoint or a prefill."""

import argparse
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from echokv.config import EngineConfig
from echokv.errors import ConfigError

if TYPE_CHECKING:
    from echokv.bench.decode_engine import LoadedModel, PoolSizes
    from echokv.bench.decode_replay import SelectionSource


def add_parser(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `decode`."""
    parser = benchmarks.add_parser(
        "decode",
        help="decode steps of a full-size model: random weights, prefilled pools",
        description="Put requests of given context lengths straight into the decode state of an"
        " engine with random weights, and time its steps; or, with --all-at-once, its throughput."
        " --compare runs with and without offload in turns.",
        allow_abbrev=False,
    )
    _add_model(parser.add_argument_group("model"))
    _add_load(parser.add_argument_group("load"))
    _add_pools(parser.add_argument_group("pools"))
    group = parser.add_argument_group("measurement")
    group.add_argument("--steps", type=int, default=20, help="timed steps a round (%(default)s)")
    group.add_argument(
        "--rounds", type=int, default=3, help="turns of each variant (default: %(default)s)"
    )
    group.add_argument(
        "--warmup-steps", type=int, default=5, help="untimed steps before (default: %(default)s)"
    )
    group.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="also list the N kernels that take most of a step's time on the GPU",
    )
    group.add_argument("--output-json", type=Path, metavar="PATH", help="write the result here")
    parser.set_defaults(run=run)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset",
        default="deepseek-v3.2-dp8-slice",
        help="shapes of the model: deepseek-v3.2-dp8-slice (one GPU of eight: 61 layers, 32 of 256"
        " experts) or small (default: %(default)s)",
    )
    group.add_argument("--num-layers", type=int, help="decoder layers (default: the preset's)")
    group.add_argument(
        "--dense-layers", type=int, help="leading layers without experts (default: the preset's)"
    )
    group.add_argument(
        "--num-experts", type=int, help="routed experts a layer (default: the preset's)"
    )
    group.add_argument(
        "--weights",
        choices=("bf16", "fp8"),
        default="bf16",
        help="bf16 (the compute dtype), or fp8 in blocks of 128 x 128 (default: %(default)s)",
    )
    for flag, what in (
        ("--backend", "kernels: auto, reference, triton or cuda"),
        ("--device", "auto, cpu or cuda"),
        ("--dtype", "of the computation: auto, float32 or bfloat16"),
        ("--kv-cache-dtype", "row format: auto, float32, bfloat16 or fp8_ds_mla"),
        ("--index-key-dtype", "of the indexer's keys: auto, float32, bfloat16 or fp8"),
        ("--attention-kernel", "sparse attention: auto, flashmla or triton"),
        ("--gemm-kernel", "with fp8 weights: auto, deepgemm or triton"),
        ("--indexer-kernel", "index scores: auto, deepgemm or triton"),
    ):
        group.add_argument(flag, default="auto", help=f"{what} (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of weights, rows and keys")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch", type=int, default=1, help="requests running at once (default: %(default)s)"
    )
    group.add_argument(
        "--context-len",
        default="32768",
        metavar="N|N-N",
        help="computed tokens of each request, or a range to draw from (default: %(default)s)",
    )
    group.add_argument(
        "--all-at-once",
        action="store_true",
        help="throughput: queue --num-requests at once and decode --output-len tokens of each",
    )
    group.add_argument(
        "--num-requests", type=int, help="of --all-at-once (default: as many as run at once)"
    )
    group.add_argument(
        "--output-len",
        type=int,
        default=256,
        help="tokens that each request of --all-at-once decodes (default: %(default)s)",
    )
    group.add_argument(
        "--hit-rate",
        metavar="RATE|paper",
        help="replay generated selections of which this share was selected the step before; paper:"
        " 0.97 to 0.99, in one layer 0.95, in one 0.88 (default: the real indexer's selections)",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="replay the decoding steps of this trace (bench trace record) instead",
    )


def _add_pools(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device-pool-tokens",
        type=int,
        help="KV rows on the device, tokens a layer (default: 4 selections a request; without"
        " offload, every token)",
    )
    group.add_argument(
        "--host-pool-tokens", type=int, help="host pool, tokens (default: what the requests need)"
    )
    group.add_argument(
        "--kv-hbm-gb",
        type=float,
        metavar="GB",
        help="size pools and batch by the HBM for rows, index keys and metadata, in 10^9 bytes,"
        " instead of by --batch",
    )
    group.add_argument(
        "--no-offload", action="store_true", help="keep every row on the device, no host pool"
    )
    group.add_argument(
        "--compare", action="store_true", help="run with and without offload, in turns"
    )


def run(args: argparse.Namespace) -> int:
    """Measure."""
    from rich.console import Console

    from echokv.bench import decode_report, report
    from echokv.bench.decode_engine import LoadedModel
    from echokv.bench.decode_preset import preset_config

    _check(args)
    raw = preset_config(
        args.preset,
        num_layers=args.num_layers,
        dense_layers=args.dense_layers,
        num_experts=args.num_experts,
        weights=args.weights,
    )
    with TemporaryDirectory(prefix="echokv-decode-") as folder:
        loaded = LoadedModel.make(raw, Path(folder), _base_config(args, folder))
        if args.profile and loaded.device.type != "cuda":
            raise ConfigError(f"--profile lists GPU kernels, this run is on {loaded.device.type}")
        variants = _all_at_once(args, loaded) if args.all_at_once else _steps(args, loaded)
    result: dict[str, Any] = {
        **decode_report.run_figures(loaded, args.preset),
        "mode": "throughput" if args.all_at_once else "steps",
        "variants": variants,
        "ratio": decode_report.ratios(variants),
    }
    decode_report.render(result, Console())
    if args.output_json:
        report.write_json(args.output_json, result)
        print(f"wrote {args.output_json}")
    return 0


def _base_config(args: argparse.Namespace, folder: str) -> EngineConfig:
    return EngineConfig(
        model=folder,
        backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        index_key_dtype=args.index_key_dtype,
        attention_kernel=args.attention_kernel,
        gemm_kernel=args.gemm_kernel,
        indexer_kernel=args.indexer_kernel,
        seed=args.seed,
        max_waiting_requests=2**20,
    )


def _check(args: argparse.Namespace) -> None:
    for flag in ("batch", "steps", "rounds", "output_len"):
        if getattr(args, flag) < 1:
            raise ConfigError(
                f"--{flag.replace('_', '-')} must be at least 1, got {getattr(args, flag)}"
            )
    if args.compare and args.no_offload:
        raise ConfigError("--compare runs both ways: leave --no-offload out")
    if args.hit_rate is not None and args.trace is not None:
        raise ConfigError("--hit-rate and --trace both say what to select: leave one out")
    if args.num_requests is not None and not args.all_at_once:
        raise ConfigError("--num-requests is for --all-at-once; --batch requests run otherwise")


def _context_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        span = int(low), int(high or low)
    except ValueError as error:
        raise ConfigError(f"--context-len must be N or N-N, got {text!r}") from error
    if not 1 <= span[0] <= span[1]:
        raise ConfigError(f"--context-len {text!r}: lengths must be at least 1 and ascend")
    return span


def _context_lens(text: str, count: int) -> list[int]:
    low, high = _context_range(text)
    lengths = random.Random(0)
    return [lengths.randint(low, high) for _ in range(count)]


def _source(args: argparse.Namespace, loaded: "LoadedModel") -> "SelectionSource | None":
    from echokv.bench.decode_replay import Turnover, hit_rates, turnover_rows
    from echokv.bench.decode_trace import TraceReplay

    config = loaded.config
    if args.trace is not None:
        shortest = _context_range(args.context_len)[0]
        trace = TraceReplay(args.trace, config.index_topk, len(config.index_layers), loaded.device)
        if shortest < trace.least_context:
            raise ConfigError(
                f"--trace {args.trace} selects among {trace.least_context} tokens,"
                f" --context-len is {args.context_len}"
            )
        return trace
    if args.hit_rate is None:
        return None
    rates = hit_rates(args.hit_rate, len(config.index_layers))
    return Turnover(turnover_rows(rates, config.index_topk), config.index_topk, loaded.device)


def _ways(args: argparse.Namespace) -> list[bool]:
    """Offload or not, of each variant."""
    return [True, False] if args.compare else [not args.no_offload]


def _sizes(
    args: argparse.Namespace, loaded: "LoadedModel", *, offload: bool, longest: int
) -> "PoolSizes":
    from echokv.bench.decode_sizes import TokenBytes, sizes_for_batch, sizes_for_bytes

    if args.kv_hbm_gb is not None:
        return sizes_for_bytes(
            loaded.config,
            TokenBytes.of(loaded.config, loaded.row_format, loaded.index_key_format),
            offload=offload,
            hbm_bytes=int(args.kv_hbm_gb * 1e9),
            longest=longest,
            max_host_tokens=args.host_pool_tokens,
        )
    sized_here = offload or not args.compare  # a comparison's flag is the offloaded side's
    return sizes_for_batch(
        loaded.config,
        offload=offload,
        batch=args.batch,
        longest=longest,
        device_tokens=args.device_pool_tokens if sized_here else None,
        host_tokens=args.host_pool_tokens,
    )


def _steps(args: argparse.Namespace, loaded: "LoadedModel") -> dict[str, dict[str, Any]]:
    from echokv.bench.decode_run import Steps, run_steps

    how = Steps(
        steps=args.steps,
        rounds=args.rounds,
        warmup_steps=args.warmup_steps,
        profile=args.profile,
    )
    longest = _context_range(args.context_len)[1] + how.room
    variants = [_sizes(args, loaded, offload=way, longest=longest) for way in _ways(args)]
    lengths = _context_lens(args.context_len, variants[0].batch)
    return run_steps(loaded, variants, lambda _: _source(args, loaded), lengths, how)


def _all_at_once(args: argparse.Namespace, loaded: "LoadedModel") -> dict[str, dict[str, Any]]:
    from echokv.bench.decode_run import run_throughput

    longest = _context_range(args.context_len)[1] + args.output_len
    variants = [_sizes(args, loaded, offload=way, longest=longest) for way in _ways(args)]
    lengths = [
        _context_lens(args.context_len, args.num_requests or sizes.batch) for sizes in variants
    ]
    return run_throughput(
        loaded, variants, lambda _: _source(args, loaded), lengths, args.output_len
    )
