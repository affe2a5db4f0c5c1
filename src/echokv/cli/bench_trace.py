"""`echokv bench trace record` and `echokv bench trace replay`: flags in, files and a table out."""

import argparse
import dataclasses
from fractions import Fraction
from pathlib import Path

from echokv.cli import flags, workload_flags
from echokv.errors import ConfigError

_POOLS = "1/2,1/4,1/8,1/16"
_ALPHAS = "0.1,0.3,0.5,0.7,0.9,1"


def add_parser(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `trace` with its two commands."""
    parser = benchmarks.add_parser(
        "trace",
        help="record what the cache is asked for, and replay it without a model",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="trace_command", metavar="COMMAND", required=True)
    _add_record(commands)
    _add_replay(commands)


def _add_record(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "record",
        help="run requests and write down every selection",
        description="Run requests offline and record, layer by layer and step by step, the rows"
        " that attention selects and the k-th scores. Give the pool and the batch with the"
        " engine's flags; --max-num-seqs requests share it.",
        allow_abbrev=False,
    )
    flags.add_engine_flags(parser)
    workload_flags.add_workload_flags(parser)
    parser.add_argument(
        "--tasks",
        metavar="NAME,...",
        help="prompts from these generated tasks, --input-len tokens each, instead of the"
        " workload's; num-prompts of them in turn",
    )
    parser.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let outputs end early instead of generating exactly the output length",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of every request; 0 is greedy"
    )
    parser.add_argument(
        "--prompt-rows",
        type=int,
        metavar="N",
        help="record what only the last N tokens of each prompt select, for a smaller file"
        " (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="trace to write (.npz)"
    )
    parser.set_defaults(run=run_record)


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "replay",
        help="hit rates and predictions of a recorded trace",
        description="Replay a trace through the cache manager at several pool sizes, against LRU"
        " and Belady's optimum, and see how well k-th scores predict each other.",
        allow_abbrev=False,
    )
    parser.add_argument("trace_file", type=Path, metavar="TRACE", help="file of `trace record`")
    parser.add_argument(
        "--pools",
        default=_POOLS,
        metavar="F,F",
        help="device slots a layer, as shares of the live tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--policies",
        default="product,lru,belady",
        metavar="NAME,...",
        help="what to replay through (default: %(default)s)",
    )
    parser.add_argument(
        "--alphas",
        default=_ALPHAS,
        metavar="A,A",
        help="weights of the newest k-th score in the prediction (default: %(default)s)",
    )
    parser.add_argument("--output-json", type=Path, metavar="PATH", help="write the result here")
    parser.add_argument("--plot-dir", type=Path, metavar="DIR", help="write PNG plots here")
    parser.set_defaults(run=run_replay)


def run_record(args: argparse.Namespace) -> int:
    """Record a trace."""
    from echokv.bench.trace_format import save_trace
    from echokv.bench.trace_record import record_trace
    from echokv.engine.sampling_params import SamplingParams
    from echokv.engine.tokenizer import Tokenizer

    config = flags.engine_config(args)
    tokenizer = Tokenizer.from_dir(config.model)
    if args.tasks:
        from echokv.bench.quality_tasks import task_instances

        names = args.tasks.split(",")
        each = -(-args.num_prompts // len(names))
        instances = task_instances(names, [args.input_len], each, tokenizer)
        prompts = [(one.prompt_token_ids, args.output_len) for one in instances][: args.num_prompts]
        about = {"tasks": names, "num_prompts": len(prompts), "input_len": args.input_len}
    else:
        prompts = [
            (
                tuple(tokenizer.encode(one.prompt)) if isinstance(one.prompt, str) else one.prompt,
                one.output_len,
            )
            for one in workload_flags.workload(args)
        ]
        about = workload_flags.describe(args)
    jobs = [
        (
            prompt,
            SamplingParams(
                max_tokens=output_len,
                ignore_eos=not args.stop_at_eos,
                temperature=args.temperature,
                seed=index,
            ),
        )
        for index, (prompt, output_len) in enumerate(prompts)
    ]
    trace = record_trace(
        config,
        jobs,
        prompt_rows=args.prompt_rows,
        about={"workload": about, "config": dataclasses.asdict(config)},
    )
    save_trace(trace, args.out)
    print(
        f"wrote {args.out}: {trace.num_passes} passes, {trace.positions.shape[1]} selections a"
        f" layer, {len(trace.layers)} layers, {args.out.stat().st_size / 1e6:.2f} MB"
    )
    return 0


def run_replay(args: argparse.Namespace) -> int:
    """Replay a trace."""
    from echokv.bench import report, trace_report
    from echokv.bench.trace_format import load_trace

    policies = args.policies.split(",")
    unknown = [name for name in policies if name not in trace_report.REPLAYS]
    if unknown:
        raise ConfigError(f"--policies {unknown[0]!r} is not one of {trace_report.REPLAYS}")
    pools, alphas = fractions(args.pools), _alphas(args.alphas)
    figures = trace_report.replay_figures(load_trace(args.trace_file), pools, policies, alphas)
    figures["trace"] = str(args.trace_file)
    print(trace_report.render_replay(figures))
    if args.output_json:
        report.write_json(args.output_json, figures)
        print(f"wrote {args.output_json}")
    if args.plot_dir:
        for path in trace_report.plot_replay(figures, args.plot_dir):
            print(f"wrote {path}")
    return 0


def fractions(text: str) -> list[Fraction]:
    """Comma-separated shares in (0, 1], such as 1/4 or 0.25.

    Raises:
        ConfigError: something else.
    """
    try:
        values = [Fraction(part.strip()) for part in text.split(",")]
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"--pools must be shares such as 1/4, got {text!r}") from error
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(f"--pools must be in (0, 1], got {text!r}")
    return values


def _alphas(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--alphas must be numbers, got {text!r}") from error
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(f"--alphas must be in (0, 1], got {text!r}")
    return values
