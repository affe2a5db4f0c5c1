"""`echokv serve MODEL`: the OpenAI-compatible server; says how to try it once it is ready."""

import argparse
import asyncio
import json
import shlex
from typing import TYPE_CHECKING

from echokv.cli import flags

if TYPE_CHECKING:
    from echokv.memory.byte_plan import BytePlan

_MIB = 2**20


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `serve` command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        description="Serve a model over an OpenAI-compatible API until SIGTERM or SIGINT.",
        allow_abbrev=False,
    )
    flags.add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=int, default=8000, help="TCP port; 0 takes a free one (default: %(default)s)"
    )
    group.add_argument(
        "--api-key", help="what clients must send as a bearer token (default: everyone may ask)"
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="seconds that running requests get to finish after SIGTERM (default: %(default)g)",
    )
    group.add_argument(
        "--max-body-mib",
        type=float,
        default=32.0,
        metavar="MIB",
        help="largest request body, in MiB; larger ones are refused (default: %(default)g)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end."""
    from rich.console import Console

    from echokv.engine.async_engine import AsyncEngine
    from echokv.server.lifecycle import serve

    engine = AsyncEngine(flags.engine_config(args))

    def announce(port: int) -> None:
        plan = engine.engine.plan
        Console().print(plan.render())
        print(ready_text(args, port, engine.model_name, plan), flush=True)

    asyncio.run(
        serve(
            engine,
            host=args.host,
            port=args.port,
            api_key=args.api_key,
            drain_timeout_s=args.drain_timeout,
            max_body_bytes=int(args.max_body_mib * _MIB),
            on_ready=announce,
        )
    )
    return 0


def ready_text(args: argparse.Namespace, port: int, model_name: str, plan: "BytePlan") -> str:
    """What the user reads when the server is ready: how requests are kept, and a line to try."""
    if plan.offload:
        pools = (
            f"{plan.host_slots:,} tokens fit the host pool;"
            f" {plan.device_slots:,} rows a layer are kept on the device"
        )
    else:
        pools = f"{plan.host_slots:,} tokens fit the device; nothing is offloaded"
    return f"{pools}\nready; try:\n  {curl_line(args, port, model_name)}"


def curl_line(args: argparse.Namespace, port: int, model_name: str) -> str:
    """A shell command that asks this server for a completion; never shows the API key itself."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/completions"
    body = json.dumps({"model": model_name, "prompt": "Once upon a time", "max_tokens": 32})
    key = ' -H "Authorization: Bearer $API_KEY"' if args.api_key else ""
    return f"curl {url}{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
