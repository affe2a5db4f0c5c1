"""Sampling flags, and the one place where they become parameters.

Every flag names the `SamplingParams` field that it sets; defaults are the dataclass's own.
"""

import argparse

from echokv.cli.flags import Flag, add_flags
from echokv.engine.sampling_params import SamplingParams

SAMPLING_FLAGS = (
    Flag(
        names=("--temperature",),
        field="temperature",
        parse=float,
        help="0 is greedy; else logits are divided by it",
    ),
    Flag(
        names=("--top-p",),
        field="top_p",
        parse=float,
        help="keep the likeliest tokens up to this probability, in (0, 1]",
    ),
    Flag(
        names=("--top-k",),
        field="top_k",
        parse=int,
        help="keep that many of the likeliest tokens; 0 or -1 keeps all",
    ),
    Flag(
        names=("--min-p",),
        field="min_p",
        parse=float,
        help="drop tokens below this share of the likeliest's probability",
    ),
    Flag(
        names=("--sampling-seed",),
        field="seed",
        parse=int,
        help="seed of every request (default: drawn from --seed, one per request)",
    ),
    Flag(names=("--presence-penalty",), field="presence_penalty", parse=float, help="in [-2, 2]"),
    Flag(names=("--frequency-penalty",), field="frequency_penalty", parse=float, help="in [-2, 2]"),
    Flag(
        names=("--repetition-penalty",),
        field="repetition_penalty",
        parse=float,
        help="above 0; 1 is none",
    ),
    Flag(
        names=("--logprobs",),
        field="logprobs",
        parse=int,
        help="alternatives to report a token (default: report nothing)",
    ),
    Flag(names=("--stop",), field="stop", many=True, help="string that ends an output; repeatable"),
    Flag(
        names=("--stop-token-id",),
        field="stop_token_ids",
        parse=int,
        many=True,
        help="token id that ends an output; repeatable",
    ),
    Flag(
        names=("--max-tokens",),
        field="max_tokens",
        parse=int,
        help="most output tokens per request (default: up to --max-model-len)",
    ),
    Flag(
        names=("--min-tokens",),
        field="min_tokens",
        parse=int,
        help="output tokens before an output may end, per request",
    ),
    Flag(
        names=("--ignore-eos",),
        field="ignore_eos",
        parse=None,
        help="go on past the end-of-sequence token",
    ),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add every sampling flag."""
    add_flags(
        parser.add_argument_group("sampling"), SAMPLING_FLAGS, SamplingParams, prefix="sampling_"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the flags describe.

    Raises:
        RequestError: a value out of range.
    """
    values = {flag.field: getattr(args, f"sampling_{flag.field}") for flag in SAMPLING_FLAGS}
    for flag in SAMPLING_FLAGS:
        if flag.many:
            values[flag.field] = tuple(values[flag.field] or ())
    return SamplingParams(**values)
