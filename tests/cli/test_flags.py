"""Flags against the dataclasses that they set, field by field."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from echokv.cli.flags import ENGINE_FLAGS, Flag, add_engine_flags, engine_config, model_dir
from echokv.cli.main import build_parser
from echokv.cli.sampling_flags import SAMPLING_FLAGS, add_sampling_flags, sampling_params
from echokv.config import EngineConfig
from echokv.engine.sampling_params import SamplingParams
from echokv.errors import ConfigError, RequestError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return parser.parse_args(argv)


def fields(config: type) -> list[str]:
    return sorted(field.name for field in dataclasses.fields(config))


def test_every_field_has_exactly_one_flag() -> None:
    assert sorted(["model", *(flag.field for flag in ENGINE_FLAGS)]) == fields(EngineConfig)
    assert sorted(flag.field for flag in SAMPLING_FLAGS) == fields(SamplingParams)


def test_no_flags_give_the_defaults() -> None:
    assert engine_config(parse("dir")) == EngineConfig(model="dir")
    assert sampling_params(parse("dir")) == SamplingParams()


ENGINE_CASES: list[tuple[list[str], dict[str, Any]]] = [
    (["--served-model-name", "m"], {"served_model_name": "m"}),
    (["--backend", "triton"], {"backend": "triton"}),
    (["--attention-kernel", "flashmla"], {"attention_kernel": "flashmla"}),
    (["--gemm-kernel", "torch"], {"gemm_kernel": "torch"}),
    (["--indexer-kernel", "deepgemm"], {"indexer_kernel": "deepgemm"}),
    (["--device", "cpu"], {"device": "cpu"}),
    (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
    (["--kv-cache-dtype", "fp8_ds_mla"], {"kv_cache_dtype": "fp8_ds_mla"}),
    (["--index-key-dtype", "fp8"], {"index_key_dtype": "fp8"}),
    (["--host-pool-gib", "1.5"], {"host_pool_gib": 1.5}),
    (["--host-memory", "pinned"], {"host_memory": "pinned"}),
    (["--device-pool-tokens", "640"], {"device_pool_tokens": 640}),
    (["--no-offload"], {"offload": False}),
    (["--prefetch", "on"], {"prefetch": "on"}),
    (["--max-model-len", "4096"], {"max_model_len": 4096}),
    (["--max-num-seqs", "3"], {"max_num_seqs": 3}),
    (["--max-num-batched-tokens", "99"], {"max_num_batched_tokens": 99}),
    (["--max-waiting-requests", "7"], {"max_waiting_requests": 7}),
    (["--no-prefix-caching"], {"enable_prefix_caching": False}),
    (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
    (["--enforce-eager"], {"enforce_eager": True}),
    (["--no-async-scheduling"], {"async_scheduling": False}),
    (["--check-cache"], {"check_cache": True}),
    (["--seed", "11"], {"seed": 11}),
]


@pytest.mark.parametrize(("argv", "expected"), ENGINE_CASES, ids=str)
def test_each_engine_flag_sets_its_field(argv: list[str], expected: dict[str, Any]) -> None:
    if expected.get("max_num_batched_tokens") == 99:
        argv, expected = [*argv, "--max-num-seqs", "9"], expected | {"max_num_seqs": 9}
    assert engine_config(parse("dir", *argv)) == EngineConfig(model="dir", **expected)


def test_every_engine_flag_is_tried_above() -> None:
    tried = {argv[0] for argv, _ in ENGINE_CASES}
    assert tried == {name for flag in ENGINE_FLAGS for name in flag.names}


def test_sampling_flags_set_their_fields() -> None:
    argv = (
        "dir --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --sampling-seed 5"
        " --presence-penalty 0.2 --frequency-penalty -0.2 --repetition-penalty 1.1 --logprobs 3"
        " --stop a --stop b --stop-token-id 1 --stop-token-id 2 --max-tokens 9 --min-tokens 2"
        " --ignore-eos"
    )
    assert sampling_params(parse(*argv.split())) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=5,
        presence_penalty=0.2,
        frequency_penalty=-0.2,
        repetition_penalty=1.1,
        logprobs=3,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
    )


def test_the_two_seeds_are_apart() -> None:
    args = parse("dir", "--seed", "3", "--sampling-seed", "4")
    assert (engine_config(args).seed, sampling_params(args).seed) == (3, 4)


def test_the_model_is_given_by_position_or_by_flag() -> None:
    assert model_dir(parse("a")) == model_dir(parse("--model", "a")) == "a"
    assert model_dir(parse("a", "--model", "a")) == "a"
    assert model_dir(parse()) is None
    with pytest.raises(ConfigError, match="'a' and --model 'b'"):
        model_dir(parse("a", "--model", "b"))
    with pytest.raises(ConfigError, match="no model given"):
        engine_config(parse())


def test_values_out_of_range_are_refused_by_the_dataclass() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        engine_config(parse("dir", "--max-num-seqs", "0"))
    with pytest.raises(RequestError, match="top_p"):
        sampling_params(parse("dir", "--top-p", "0"))


SIZED = re.compile(r"(gib|tokens|len|seqs|requests)$")


@pytest.mark.parametrize("flag", ENGINE_FLAGS, ids=lambda flag: flag.names[0])
def test_the_help_of_a_size_says_its_unit(flag: Flag) -> None:
    assert flag.help
    if SIZED.search(flag.names[0]):
        assert re.search(r"GiB|tokens|requests", flag.help)


def test_the_readme_names_only_flags_that_exist() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = set(re.findall(r"`(--[a-z][a-z-]+)", readme))
    assert shown
    assert shown <= known_options(build_parser())


def known_options(parser: argparse.ArgumentParser) -> set[str]:
    options: set[str] = set()
    for action in parser._actions:
        options.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                options |= known_options(child)
    return options
