"""`echokv bench throughput` and `echokv bench serve`: flags in, a printed block and JSON out.

`trace`, `quality` and `decode` have modules of their own.
"""

import argparse
import asyncio
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from echokv.bench.workload import BenchRequest, random_workload
from echokv.cli import bench_decode, bench_quality, bench_trace, flags, workload_flags
from echokv.errors import ConfigError, EchoKVError

_REQUEST_TIMEOUT_S = 3600.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `bench` command with its benchmarks."""
    parser = commands.add_parser("bench", help="measure an engine or a server", allow_abbrev=False)
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    _add_throughput(benchmarks)
    _add_serve(benchmarks)
    bench_trace.add_parser(benchmarks)
    bench_quality.add_parser(benchmarks)
    bench_decode.add_parser(benchmarks)


def _add_throughput(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benchmarks.add_parser(
        "throughput",
        help="offline: all requests at once, no server",
        description="Queue every request at once in an engine of this process and time the whole.",
        allow_abbrev=False,
    )
    flags.add_engine_flags(parser)
    workload_flags.add_workload_flags(parser)
    parser.add_argument(
        "--num-warmups",
        type=int,
        default=1,
        help="requests run before the clock starts (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of every request; 0 is greedy"
    )
    parser.add_argument("--output-json", type=Path, metavar="PATH", help="write the result here")
    parser.set_defaults(run=run_throughput)


def _add_serve(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benchmarks.add_parser(
        "serve",
        help="load client for an OpenAI-compatible server",
        description="Send streaming completions to a running server and time every chunk.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--base-url", help="server, such as http://127.0.0.1:8000, instead of --host and --port"
    )
    parser.add_argument("--host", default="127.0.0.1", help="server's host (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8000, help="server's port (default: %(default)s)"
    )
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--model", help="model name to ask for (default: the server's first)")
    workload_flags.add_workload_flags(parser)
    parser.add_argument(
        "--request-rate",
        default="inf",
        metavar="RATE",
        help="requests a second, a Poisson process; inf: all at once; trace: the trace's own"
        " arrival times (default: %(default)s)",
    )
    parser.add_argument(
        "--max-concurrency", type=int, help="most requests in flight (default: no limit)"
    )
    parser.add_argument(
        "--num-warmups",
        type=int,
        default=1,
        help="short requests sent before the clock starts (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of every request; 0 is greedy"
    )
    parser.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let outputs end early instead of asking for exactly the output length",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the arrival times")
    parser.add_argument(
        "--metric-percentiles",
        default="99",
        metavar="P,P",
        help="percentiles to report, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=_REQUEST_TIMEOUT_S,
        help="seconds without a byte before a request has failed (default: %(default)s)",
    )
    parser.add_argument(
        "--output-json",
        "--result-filename",
        type=Path,
        metavar="PATH",
        help="write the result here, one request's figures included",
    )
    parser.set_defaults(run=run_serve)


def run_throughput(args: argparse.Namespace) -> int:
    """Measure an engine in this process."""
    from tqdm import tqdm

    from echokv.bench import report, throughput
    from echokv.engine.engine import Engine

    requests = workload_flags.workload(args)
    engine = Engine(flags.engine_config(args))
    try:
        requests = [
            dataclasses.replace(request, prompt=tuple(engine.tokenizer.encode(request.prompt)))
            if isinstance(request.prompt, str)
            else request
            for request in requests
        ]
        total = sum(request.output_len for request in requests)
        with tqdm(
            total=total, desc="generating", unit="tok", disable=not sys.stderr.isatty()
        ) as bar:
            result = throughput.run_throughput(
                engine,
                requests,
                warmup=_warmup(args),
                temperature=args.temperature,
                on_token=bar.update,
            )
        result["config"] = dataclasses.asdict(engine.config)
    finally:
        engine.close()
    result["workload"] = workload_flags.describe(args)
    print(throughput.render_throughput(result))
    if args.output_json:
        report.write_json(args.output_json, result)
        print(f"wrote {args.output_json}")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """Measure a server over HTTP; exit status 1 when a request failed."""
    from echokv.bench import report
    from echokv.bench.metrics import render_serving_result

    percentiles = _percentiles(args.metric_percentiles)
    result, details = asyncio.run(_measure_server(args, percentiles))
    print(
        render_serving_result(
            result,
            percentiles=percentiles,
            max_concurrency=args.max_concurrency,
            request_rate=float("inf" if args.request_rate == "trace" else args.request_rate),
        )
    )
    failures = [error for error in details["errors"] if error]
    for error in failures[:10]:
        print(f"failed: {error}", file=sys.stderr)
    if args.output_json:
        report.write_json(args.output_json, result | details)
        print(f"wrote {args.output_json}")
    return 1 if failures else 0


async def _measure_server(
    args: argparse.Namespace, percentiles: list[float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    from tqdm import tqdm

    from echokv.bench import serving
    from echokv.bench.metrics import request_details, serving_metrics

    load = serving.Load(
        request_rate=_rate(args.request_rate),
        use_arrivals=args.request_rate == "trace",
        max_concurrency=args.max_concurrency,
        seed=args.seed,
        ignore_eos=not args.stop_at_eos,
        temperature=args.temperature,
    )
    requests = workload_flags.workload(args)
    load.send_times(requests)  # an error in the flags comes before any traffic
    url = args.base_url or f"http://{args.host}:{args.port}"
    client = serving.connect(url, api_key=args.api_key, timeout_s=args.request_timeout)
    async with client:
        model = args.model or await serving.served_model(client)
        for request in _warmup(args):
            timing = await serving.send(client, model, request, load)
            if timing.error is not None:
                raise EchoKVError(f"the warm-up request to {url} failed: {timing.error}")
        with tqdm(
            total=len(requests), desc="requests", unit="req", disable=not sys.stderr.isatty()
        ) as bar:
            timings, duration = await serving.run_load(
                client, model, requests, load, on_done=bar.update
            )
    result = {
        "backend": "openai",
        "endpoint_type": "openai",
        "base_url": url,
        "model_id": model,
        "request_rate": args.request_rate,
        "burstiness": 1.0,
        "max_concurrency": args.max_concurrency,
        "num_prompts": len(requests),
        "workload": workload_flags.describe(args),
    }
    return (
        result | serving_metrics(timings, duration, percentiles=percentiles),
        request_details(timings),
    )


def _warmup(args: argparse.Namespace) -> list[BenchRequest]:
    """Short requests from a seed that no workload is likely to use, so that no prefix is shared."""
    return random_workload(
        args.num_warmups, input_len=64, output_len=4, vocab_size=args.vocab_size, seed=2**31
    )


def _rate(text: str) -> float:
    if text == "trace":
        return math.inf
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--request-rate must be a number, inf or trace, got {text!r}") from error


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles must be numbers, got {text!r}") from error
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric-percentiles must be in [0, 100], got {text!r}")
    return values
