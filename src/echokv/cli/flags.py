"""Flags that several commands share, and the one place where they become configs.

Every engine flag names the `EngineConfig` field that it sets, every sampling flag the
`SamplingParams` field; defaults are the dataclasses' own.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from echokv.config import EngineConfig
from echokv.engine.sampling_params import SamplingParams
from echokv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command-line flag and the dataclass field that it sets."""

    names: tuple[str, ...]
    field: str
    help: str
    parse: Callable[[str], Any] | None = str  # None: a switch that sets `switch`
    switch: bool = True
    many: bool = False  # may be given several times


ENGINE_FLAGS = (
    Flag(
        names=("--served-model-name",),
        field="served_model_name",
        help="name that clients ask for (default: the checkpoint directory's name)",
    ),
    Flag(
        names=("--backend",),
        field="backend",
        help="kernels, one set per engine: auto, reference (PyTorch), triton or cuda (Hopper)",
    ),
    Flag(
        names=("--attention-kernel",),
        field="attention_kernel",
        help="sparse attention: auto, flashmla (Hopper, fp8_ds_mla rows) or backend",
    ),
    Flag(
        names=("--gemm-kernel",),
        field="gemm_kernel",
        help="products with block-fp8 weights: auto, deepgemm (Hopper), backend, or torch, which"
        " converts the weights to --dtype when they are loaded",
    ),
    Flag(
        names=("--indexer-kernel",),
        field="indexer_kernel",
        help="index scores: auto, deepgemm (Hopper, fp8 keys) or backend",
    ),
    Flag(
        names=("--device",),
        field="device",
        help="where the model runs, one device per engine: auto, cpu or cuda",
    ),
    Flag(
        names=("--dtype",),
        field="dtype",
        help="data type of the computation: auto, float32 or bfloat16",
    ),
    Flag(
        names=("--kv-cache-dtype",),
        field="kv_cache_dtype",
        help="row format of both pools: auto, float32, bfloat16 or fp8_ds_mla",
    ),
    Flag(
        names=("--index-key-dtype",),
        field="index_key_dtype",
        help="format of the indexer's keys: auto, float32, bfloat16 or fp8",
    ),
    Flag(
        names=("--host-pool-gib",),
        field="host_pool_gib",
        parse=float,
        help="host memory for KV rows, in GiB per engine, all layers together",
    ),
    Flag(
        names=("--device-pool-tokens",),
        field="device_pool_tokens",
        parse=int,
        help="KV rows kept on the device, in tokens a layer",
    ),
    Flag(
        names=("--no-offload",),
        field="offload",
        parse=None,
        switch=False,
        help="keep every row on the device, with no host pool",
    ),
    Flag(
        names=("--prefetch",),
        field="prefetch",
        help="move KV rows early, on predictions: auto (where whole steps were measured to gain:"
        " nowhere yet), on or off",
    ),
    Flag(
        names=("--max-model-len",),
        field="max_model_len",
        parse=int,
        help="longest request, prompt and output together, in tokens (default: the model's)",
    ),
    Flag(
        names=("--max-num-seqs",),
        field="max_num_seqs",
        parse=int,
        help="most requests that run at once, per engine",
    ),
    Flag(
        names=("--max-num-batched-tokens",),
        field="max_num_batched_tokens",
        parse=int,
        help="most tokens of one step, per engine; also the prefill chunk",
    ),
    Flag(
        names=("--max-waiting-requests",),
        field="max_waiting_requests",
        parse=int,
        help="most requests that wait, per engine; more are refused",
    ),
    Flag(
        names=("--no-prefix-caching", "--no-enable-prefix-caching"),
        field="enable_prefix_caching",
        parse=None,
        switch=False,
        help="compute every prompt in full, sharing no rows between requests",
    ),
    Flag(
        names=("--enforce-eager",),
        field="enforce_eager",
        parse=None,
        help="run decode without CUDA graphs (slower; for debugging)",
    ),
    Flag(
        names=("--no-async-scheduling",),
        field="async_scheduling",
        parse=None,
        switch=False,
        help="choose a step only when the one before is done (slower; for debugging)",
    ),
    Flag(
        names=("--check-cache",),
        field="check_cache",
        parse=None,
        help="verify the cache's invariants after every step (slow; for debugging)",
    ),
    Flag(
        names=("--seed",),
        field="seed",
        parse=int,
        help="seed of the engine, for requests that bring none",
    ),
)

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


def add_engine_flags(parser: argparse.ArgumentParser, *, model_required: bool = True) -> None:
    """Add `MODEL`, `--model` and every engine flag.

    Args:
        parser: the command's parser.
        model_required: whether `engine_config` will be called whatever the user gives.
    """
    group = parser.add_argument_group("engine")
    group.add_argument(
        "model_position", nargs="?", metavar="MODEL", help="checkpoint directory; same as --model"
    )
    group.add_argument(
        "--model",
        help="checkpoint directory in Hugging Face's layout" + " (required)" * model_required,
    )
    _add(group, ENGINE_FLAGS, EngineConfig)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add every sampling flag."""
    _add(parser.add_argument_group("sampling"), SAMPLING_FLAGS, SamplingParams, prefix="sampling_")


def model_dir(args: argparse.Namespace) -> str | None:
    """The checkpoint directory that the user named, by position or by `--model`.

    Raises:
        ConfigError: both were given and differ.
    """
    by_position: str | None = args.model_position
    by_flag: str | None = args.model
    if by_position is not None and by_flag is not None and by_position != by_flag:
        raise ConfigError(f"two models given: {by_position!r} and --model {by_flag!r}")
    return by_flag if by_flag is not None else by_position


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine config that the flags describe.

    Raises:
        ConfigError: no model given, or a value out of range.
    """
    model = model_dir(args)
    if model is None:
        raise ConfigError(
            "no model given: name a checkpoint directory, or make one with `echokv demo-model PATH`"
        )
    return EngineConfig(
        model=model, **{flag.field: getattr(args, flag.field) for flag in ENGINE_FLAGS}
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


def _add(
    group: argparse._ArgumentGroup, flags: Iterable[Flag], config: type, *, prefix: str = ""
) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for flag in flags:
        default = defaults[flag.field]
        options: dict[str, Any] = {"dest": prefix + flag.field, "help": flag.help}
        if flag.parse is None:
            options |= {"action": "store_const", "const": flag.switch, "default": default}
        elif flag.many:
            options |= {"action": "append", "type": flag.parse, "metavar": "VALUE"}
        else:
            options |= {"type": flag.parse, "default": default, "metavar": "VALUE"}
            if default is not None:
                options["help"] += " (default: %(default)s)"
        group.add_argument(*flag.names, **options)
