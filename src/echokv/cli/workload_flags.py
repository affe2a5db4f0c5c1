"""The flags that describe a benchmark's workload, in vLLM's names, and what they turn into."""

import argparse
from pathlib import Path

from echokv.bench.workload import (
    BenchRequest,
    TraceShape,
    file_workload,
    random_workload,
    trace_workload,
)
from echokv.errors import ConfigError

DATASETS = ("random", "trace", "file")


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """Add the workload's flags to a benchmark command."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="random token ids, the lengths of a trace, or the prompts of a file"
        " (default: random, or trace with --trace)",
    )
    group.add_argument(
        "--dataset-path", type=Path, metavar="PATH", help="file of the dataset trace or file"
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="short for --dataset-name trace --dataset-path PATH: Mooncake's .jsonl, Azure's .csv",
    )
    group.add_argument(
        "--num-prompts", type=int, default=100, help="most requests to send (default: %(default)s)"
    )
    group.add_argument(
        "--input-len",
        "--random-input-len",
        type=int,
        default=512,
        help="prompt tokens of a random request, --random-prefix-len not counted"
        " (default: %(default)s)",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        type=int,
        default=64,
        help="output tokens of a random or file request (default: %(default)s)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="random lengths vary by this share, in [0, 1) (default: %(default)s)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=int,
        default=0,
        help="tokens that all random prompts begin with (default: %(default)s)",
    )
    group.add_argument(
        "--length-scale",
        type=float,
        default=1.0,
        help="factor on a trace's lengths, in and out (default: %(default)s)",
    )
    group.add_argument(
        "--max-input-len", type=int, help="a trace's inputs are cut to that many tokens"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=256,
        help="made-up token ids are below this (default: %(default)s)",
    )
    group.add_argument(
        "--workload-seed", type=int, default=0, help="seed of the workload (default: %(default)s)"
    )


def workload(args: argparse.Namespace) -> list[BenchRequest]:
    """The workload that the flags describe.

    Raises:
        ConfigError: flags that contradict each other, or a file that can't be used.
    """
    for flag in ("num_prompts", "input_len", "output_len", "vocab_size", "length_scale"):
        if getattr(args, flag) <= 0:
            raise ConfigError(
                f"--{flag.replace('_', '-')} must be positive, got {getattr(args, flag)}"
            )
    name, path = _source(args)
    if name == "random":
        return random_workload(
            args.num_prompts,
            input_len=args.input_len,
            output_len=args.output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            vocab_size=args.vocab_size,
            seed=args.workload_seed,
        )
    if path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path")
    if name == "file":
        return file_workload(path, args.num_prompts, output_len=args.output_len)
    shape = TraceShape(
        length_scale=args.length_scale,
        max_input_len=args.max_input_len,
        vocab_size=args.vocab_size,
    )
    return trace_workload(path, args.num_prompts, shape=shape, seed=args.workload_seed)


def describe(args: argparse.Namespace) -> dict[str, str | int | float | None]:
    """The workload's flags, for the result's JSON."""
    name, path = _source(args)
    return {
        "dataset_name": name,
        "dataset_path": str(path) if path else None,
        "num_prompts": args.num_prompts,
        "input_len": args.input_len if name == "random" else None,
        "output_len": args.output_len if name != "trace" else None,
        "random_range_ratio": args.random_range_ratio if name == "random" else None,
        "random_prefix_len": args.random_prefix_len if name == "random" else None,
        "length_scale": args.length_scale if name == "trace" else None,
        "max_input_len": args.max_input_len if name == "trace" else None,
        "vocab_size": args.vocab_size if name != "file" else None,
        "workload_seed": args.workload_seed,
    }


def _source(args: argparse.Namespace) -> tuple[str, Path | None]:
    if args.trace is None:
        return args.dataset_name or "random", args.dataset_path
    if args.dataset_name not in (None, "trace") or args.dataset_path is not None:
        raise ConfigError("--trace already says --dataset-name trace --dataset-path: give one form")
    return "trace", args.trace
