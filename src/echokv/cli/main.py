"""The `echokv` command: parses flags, sets up logging, runs one command, reports errors.

Errors that echokv raises on purpose become one line on stderr and exit status 2, like a wrong
flag; anything else is a fault of ours and keeps its traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from echokv import log
from echokv.cli import bench, demo_model, doctor, generate, serve
from echokv.errors import EchoKVError

_COMMANDS = (serve, generate, bench, doctor, demo_model)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's module adds its own part."""
    parser = argparse.ArgumentParser(
        prog="echokv",
        description="Serve native-sparse-attention LLMs with the KV cache in host memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"echokv {version('echokv')}")
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="least severe log lines to show on stderr (default: %(default)s)",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit status: 0, 1 (the command says no), 2 (an error of the user's), 130 (interrupted).
    """
    args = build_parser().parse_args(argv)
    log.setup(args.log_level)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except EchoKVError as error:
        print(f"echokv {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our stdout has gone; keep the interpreter from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
