"""The instances that `bench quality` asks: generated tasks, and key-value documents from files."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from echokv.bench.tasks import kv_prompt, make_task
from echokv.engine.tokenizer import Tokenizer
from echokv.errors import ConfigError

SPARE_TOKENS = 8
"""Output tokens beyond the answer's own: room to be wrong, and for the end of the turn."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One question with its answer."""

    task: str
    length: str  # the group it is reported in: a target in tokens, or a file's name
    prompt_token_ids: tuple[int, ...]  # chat template included
    answer: str
    max_tokens: int

    @property
    def total_tokens(self) -> int:
        """Most tokens of prompt and output."""
        return len(self.prompt_token_ids) + self.max_tokens


def task_instances(
    tasks: Sequence[str], lengths: Sequence[int], count: int, tokenizer: Tokenizer, *, seed: int = 0
) -> list[Instance]:
    """Held-out instances of generated tasks, `count` for each task and length.

    Raises:
        ConfigError: an unknown task, or a length too short for one.
    """
    return [
        _instance(
            task,
            str(length),
            *make_task(task, length, lambda text: len(tokenizer.encode(text, False)), number),
            tokenizer,
        )
        for length in lengths
        for task in tasks
        for number in range(seed, seed + count)
    ]


def document_instances(path: Path, count: int, tokenizer: Tokenizer) -> list[Instance]:
    """The first questions of a Lost-in-the-Middle key-value file (.jsonl.gz).

    Raises:
        ConfigError: no such file, or another format.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            records = [json.loads(line) for line in islice(file, count)]
        return [
            _instance(
                "kv_uuid",
                path.name.partition(".")[0],
                kv_prompt([(key, value) for key, value in one["ordered_kv_records"]], one["key"]),
                one["value"],
                tokenizer,
            )
            for one in records
        ]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a key-value retrieval file: {error!r}") from error


def _instance(task: str, length: str, prompt: str, answer: str, tokenizer: Tokenizer) -> Instance:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return Instance(
        task=task,
        length=length,
        prompt_token_ids=tuple(ids),
        answer=answer,
        max_tokens=len(tokenizer.encode(answer, False)) + SPARE_TOKENS,
    )
