"""What a benchmark asks for: prompts, output lengths and arrival times, from a seed or a file.

Prompts made here are token ids, so that their length is exact whatever the tokenizer.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from echokv.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
"""Tokens that one entry of a Mooncake trace's `hash_ids` stands for."""


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request of a workload."""

    prompt: str | tuple[int, ...]  # text, or token ids
    output_len: int  # tokens to generate
    arrival_s: float | None = None  # seconds after the first request, where the source says

    def __post_init__(self) -> None:
        if not self.prompt or self.output_len < 1:
            raise ConfigError(
                f"a benchmark request needs a prompt and an output: got {len(self.prompt)} prompt"
                f" tokens or characters and an output length of {self.output_len}"
            )


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """How a trace's lengths are fitted to a model.

    Attributes:
        length_scale: factor on every input and output length, and on the shared blocks.
        max_input_len: longer inputs are cut to that many tokens; None cuts nothing.
        vocab_size: token ids are drawn from [0, vocab_size).
    """

    length_scale: float = 1.0
    max_input_len: int | None = None
    vocab_size: int = 256

    def scaled(self, length: int) -> int:
        """A length in tokens after scaling; at least 1."""
        return max(1, round(length * self.length_scale))

    def input_len(self, length: int) -> int:
        """An input length after scaling and cutting."""
        return min(self.scaled(length), self.max_input_len or self.scaled(length))


def random_workload(
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    vocab_size: int = 256,
    seed: int = 0,
) -> list[BenchRequest]:
    """Prompts of random token ids.

    Args:
        count: how many.
        input_len: tokens a prompt, the shared prefix not counted.
        output_len: tokens an output.
        range_ratio: in [0, 1); both lengths are uniform in [n (1 - r), n (1 + r)].
        prefix_len: tokens that all prompts begin with.
        vocab_size: ids are drawn from [0, vocab_size).
        seed: same seed, same workload.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {range_ratio}")
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, prefix_len).tolist()

    def around(length: int) -> int:
        low, high = int(length * (1 - range_ratio)), int(length * (1 + range_ratio))
        return max(1, int(rng.integers(low, high + 1)))

    return [
        BenchRequest(
            prompt=(*prefix, *rng.integers(0, vocab_size, around(input_len)).tolist()),
            output_len=around(output_len),
        )
        for _ in range(count)
    ]


def trace_workload(
    path: Path, count: int | None, *, shape: TraceShape, seed: int = 0
) -> list[BenchRequest]:
    """The first requests of a published trace, with made-up tokens.

    Mooncake's (`.jsonl`: timestamp in ms, input_length, output_length, hash_ids) share prefixes
    where their hash ids are equal; Azure's (`.csv`: TIMESTAMP, ContextTokens, GeneratedTokens)
    share nothing.

    Args:
        path: the trace.
        count: how many requests; None takes all.
        shape: how lengths are fitted.
        seed: same seed, same tokens.

    Raises:
        ConfigError: no such file, or a line that isn't of either format.
    """
    read = _read_azure if path.suffix == ".csv" else _read_mooncake
    return _read(path, lambda: list(islice(read(path, shape, seed), count)))


def file_workload(path: Path, count: int | None, *, output_len: int) -> list[BenchRequest]:
    """Prompts of a file: `.jsonl` objects with `prompt` and perhaps `output_len`, else lines.

    Raises:
        ConfigError: no such file, or a line without a prompt.
    """

    def requests() -> list[BenchRequest]:
        with path.open(encoding="utf-8") as file:
            lines = islice((line.rstrip("\n") for line in file if line.strip()), count)
            if path.suffix != ".jsonl":
                return [BenchRequest(prompt=line, output_len=output_len) for line in lines]
            return [_from_json(json.loads(line), output_len) for line in lines]

    return _read(path, requests)


def _from_json(record: dict[str, Any], output_len: int) -> BenchRequest:
    prompt = record["prompt"]
    return BenchRequest(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        output_len=int(record.get("output_len", output_len)),
    )


def _read(path: Path, parse: Any) -> list[BenchRequest]:
    try:
        requests: list[BenchRequest] = parse()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a workload of the expected form: {error!r}") from error
    if not requests:
        raise ConfigError(f"{path} holds no request")
    return requests


def _read_mooncake(path: Path, shape: TraceShape, seed: int) -> Iterator[BenchRequest]:
    block_tokens = shape.scaled(TRACE_BLOCK_TOKENS)
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            blocks = [_tokens(seed, id_, block_tokens, shape) for id_ in record["hash_ids"]]
            tokens = [token for block in blocks for token in block]
            yield BenchRequest(
                prompt=tuple(tokens[: shape.input_len(record["input_length"])]),
                output_len=shape.scaled(record["output_length"]),
                arrival_s=record["timestamp"] / 1000,
            )


def _read_azure(path: Path, shape: TraceShape, seed: int) -> Iterator[BenchRequest]:
    first: datetime | None = None
    with path.open(encoding="utf-8", newline="") as file:
        for index, record in enumerate(csv.DictReader(file)):
            arrival = datetime.fromisoformat(record["TIMESTAMP"])
            first = first or arrival
            length = shape.input_len(int(record["ContextTokens"]))
            yield BenchRequest(
                prompt=tuple(_tokens(seed, index, length, shape)),
                output_len=shape.scaled(int(record["GeneratedTokens"])),
                arrival_s=(arrival - first).total_seconds(),
            )


def _tokens(seed: int, key: int, count: int, shape: TraceShape) -> list[int]:
    rng = np.random.default_rng([seed, key])
    tokens: list[int] = rng.integers(0, shape.vocab_size, count).tolist()
    return tokens
