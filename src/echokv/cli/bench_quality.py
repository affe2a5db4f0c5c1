"""`echokv bench quality`: flags in, tables, JSON and a plot out; status 1 when tokens differ."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from echokv.cli import flags
from echokv.cli.bench_trace import fractions
from echokv.errors import ConfigError

_TASKS = "passkey,needle,multi_needle,kv_names,kv_uuid,variables,sorting"


def add_parser(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `quality`."""
    parser = benchmarks.add_parser(
        "quality",
        help="exact match on long-context tasks: resident, offloaded, and lossy selection",
        description="Ask held-out questions with every row resident, offloaded at several pools,"
        " and with lossy selection as other systems have it. Fails when an offloaded run differs"
        " from the resident one in any token.",
        allow_abbrev=False,
    )
    flags.add_engine_flags(parser)
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--tasks", default=_TASKS, metavar="NAME,...", help="generated tasks (default: %(default)s)"
    )
    group.add_argument(
        "--lengths",
        default="4096,8192,16384",
        metavar="N,N",
        help="prompt tokens (default: %(default)s)",
    )
    group.add_argument(
        "--instances",
        type=int,
        default=4,
        help="instances of each task and length, and of each file (default: %(default)s)",
    )
    group.add_argument(
        "--documents",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="key-value retrieval files (.jsonl.gz) to ask too",
    )
    group.add_argument(
        "--task-seed", type=int, default=0, help="first instance's seed (default: %(default)s)"
    )
    group.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that ask at the same time, each with an engine (default: %(default)s)",
    )
    group = parser.add_argument_group("variants")
    group.add_argument(
        "--pools",
        default="1/2,1/4,1/8,1/16",
        metavar="F,F",
        help="device slots a layer, as shares of the longest context (default: %(default)s)",
    )
    group.add_argument(
        "--lossy",
        default="infinigen-like,freekv-like,clo-like",
        metavar="NAME,...",
        help="lossy selectors; empty for none (default: %(default)s)",
    )
    parser.add_argument(
        "--code-commit", metavar="HASH", help="commit to report where there is no git"
    )
    parser.add_argument(
        "--output-json",
        type=Path,
        metavar="PATH",
        help="write the result here, so far as it is known after each length",
    )
    parser.add_argument(
        "--output-md", type=Path, metavar="PATH", help="write the tables here, as Markdown"
    )
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a PNG plot here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure quality."""
    from echokv.bench import quality, quality_report, report
    from echokv.bench.lossy import LOSSY
    from echokv.bench.quality_tasks import document_instances, task_instances
    from echokv.engine.tokenizer import Tokenizer

    config = flags.engine_config(args)
    pools = fractions(args.pools)
    lossy = [name for name in args.lossy.split(",") if name]
    unknown = [name for name in lossy if name not in LOSSY]
    if unknown:
        raise ConfigError(f"--lossy {unknown[0]!r} is not one of {', '.join(LOSSY)}")
    for flag in ("instances", "workers"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag} must be at least 1, got {getattr(args, flag)}")
    tokenizer = Tokenizer.from_dir(config.model)
    instances = task_instances(
        [name for name in args.tasks.split(",") if name],
        _lengths(args.lengths),
        args.instances,
        tokenizer,
        seed=args.task_seed,
    )
    for path in args.documents:
        instances += document_instances(path, args.instances, tokenizer)
    if not instances:
        raise ConfigError("no questions: give --tasks and --lengths, or --documents")
    about = {
        "config": dataclasses.asdict(config),
        "instances": [
            {"task": one.task, "length": one.length, "answer": one.answer} for one in instances
        ],
    }
    if args.code_commit:
        about["commit"] = args.code_commit

    def save(result: dict[str, Any]) -> None:
        if args.output_json:
            report.write_json(args.output_json, result | about)

    result = quality.run_quality(
        config, instances, pools, lossy, workers=args.workers, on_group=save
    )
    tables = f"{quality_report.render_quality(result)}\n\n{quality_report.render_tasks(result)}\n"
    print(tables)
    if args.output_md:
        report.write_text(args.output_md, tables)
    if args.plot:
        quality_report.plot_quality(result, args.plot)
    if not result["lossless"]:
        print("an offloaded run gave other tokens than the resident one", file=sys.stderr)
        return 1
    return 0


def _lengths(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise ConfigError(f"--lengths must be whole numbers, got {text!r}") from error
    if not all(value > 0 for value in values):
        raise ConfigError(f"--lengths must be positive, got {text!r}")
    return values
