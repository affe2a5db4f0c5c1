"""Engine flags, which several commands share, and the one place where they become a config.

Every flag names the `EngineConfig` field that it sets; defaults are the dataclass's own.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from echokv.config import EngineConfig
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
        names=("--host-memory",),
        field="host_memory",
        help="how a GPU reads the host pool: auto, managed (large pages) or pinned (small ones)",
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
        help="move KV rows early, on predictions: on, decode (in decode steps alone), off, or auto:"
        " decode where rows can move while scores are made (--backend cuda), else off",
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
    add_flags(group, ENGINE_FLAGS, EngineConfig)


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


def add_flags(
    group: argparse._ArgumentGroup, flags: Iterable[Flag], config: type, *, prefix: str = ""
) -> None:
    """Add flags whose defaults are those of a dataclass's fields.

    Args:
        group: of a command's parser.
        flags: which.
        config: the dataclass.
        prefix: of the names under which the parser keeps their values.
    """
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
