"""`echokv demo-model PATH`: write a small random checkpoint of the real structure.

Its text is noise; everything else about it is a DSA model, so that serving can be tried anywhere.
"""

import argparse
from pathlib import Path

from echokv.errors import ConfigError


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `demo-model` command."""
    parser = commands.add_parser(
        "demo-model",
        help="write a small random checkpoint to try things with",
        description="Write a small seeded random DeepSeek-V3.2-architecture checkpoint with a"
        " byte-level tokenizer. Its output is noise.",
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="directory to make")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; refuses a directory that already holds something."""
    from echokv.models.random_checkpoint import write_random_checkpoint

    path: Path = args.path
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not an empty directory")
    write_random_checkpoint(path, seed=args.seed)
    print(f"wrote a random demo checkpoint to {path}; serve it with: echokv serve {path}")
    return 0
