"""`echokv generate`: offline generation from a file of prompts, JSONL out.

The engine runs in this process and batches the prompts; results come in the prompts' order, each
as soon as it and those before it are done.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from echokv.cli import flags, sampling_flags
from echokv.engine.outputs import RequestOutput
from echokv.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from echokv.engine.engine import Engine
    from echokv.engine.tokenizer import Tokenizer

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True)
class Prompt:
    """One prompt of the file: exactly one of the three forms, and where it stood."""

    line: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: list[dict[str, Any]] | None = None

    def encode(self, tokenizer: "Tokenizer") -> list[int]:
        """Its token ids; messages go through the model's chat template."""
        if self.token_ids is not None:
            return list(self.token_ids)
        if self.messages is not None:
            return tokenizer.apply_chat_template(self.messages)
        return tokenizer.encode(self.text or "")


@dataclass
class _Result:
    """What has been generated for one prompt so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += [
            {"token_id": entry.token_id, "logprob": entry.logprob, "top": dict(entry.top)}
            for entry in output.logprobs
        ]
        self.last = output

    @property
    def finished(self) -> bool:
        return self.last is not None and self.last.finished

    def as_json(self, index: int) -> str:
        assert self.last is not None
        record = {
            "index": index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.last.finish_reason,
            "stop_reason": self.last.stop_reason,
            "num_prompt_tokens": self.last.num_prompt_tokens,
            "num_cached_tokens": self.last.num_cached_tokens,
        }
        if self.logprobs:
            record["logprobs"] = self.logprobs
        return json.dumps(record, ensure_ascii=False)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `generate` command."""
    parser = commands.add_parser(
        "generate",
        help="generate offline from a file of prompts",
        description="Generate from a file of prompts, without a server. Each line of the result"
        " is a JSON object with index, text, token_ids and finish_reason.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="PATH",
        help="one prompt a line, or `.jsonl` objects with prompt, prompt_token_ids or messages;"
        " `-` reads stdin",
    )
    parser.add_argument(
        "--prompts-format",
        choices=("text", "jsonl"),
        help="form of --prompts (default: jsonl when its name ends in .jsonl, else text)",
    )
    parser.add_argument(
        "--output", default="-", metavar="PATH", help="JSONL file to write; `-` is stdout"
    )
    flags.add_engine_flags(parser)
    sampling_flags.add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate for every prompt of the file."""
    from echokv.engine.engine import Engine

    config = flags.engine_config(args)
    params = sampling_flags.sampling_params(args)
    jsonl = args.prompts_format == "jsonl" or (
        args.prompts_format is None and args.prompts.endswith(".jsonl")
    )
    with _opened(args.prompts, "r") as file:
        prompts = read_prompts(file, args.prompts, jsonl=jsonl)
    with _opened(args.output, "w") as out:
        engine = Engine(config)
        try:
            jobs = []
            for prompt in prompts:
                token_ids = prompt.encode(engine.tokenizer)
                with _naming(args.prompts, prompt):
                    engine.check_request(token_ids, params)
                jobs.append((token_ids, params))
            for line in _generate(engine, jobs):
                print(line, file=out, flush=True)
        finally:
            engine.close()
    return 0


def read_prompts(lines: Iterable[str], name: str, *, jsonl: bool) -> list[Prompt]:
    """Parse a file of prompts; blank lines are skipped.

    Args:
        lines: the file.
        name: what to call it in errors.
        jsonl: whether each line is a JSON object; else each line is a prompt as it stands.

    Raises:
        ConfigError: no prompt at all, bytes that aren't UTF-8, or a line that isn't such an
            object; the message has the line number.
    """
    parse = _from_json if jsonl else _from_text
    try:
        prompts = [
            parse(line, f"{name}, line {number}", number)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8: {error}") from error
    if not prompts:
        raise ConfigError(f"{name} holds no prompt")
    return prompts


def _from_text(line: str, _where: str, number: int) -> Prompt:
    return Prompt(number, text=line.rstrip("\r\n"))


def _from_json(line: str, where: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    given = [key for key in _PROMPT_KEYS if key in record] if isinstance(record, dict) else []
    if len(given) != 1:
        raise ConfigError(f"{where}: needs exactly one of {', '.join(_PROMPT_KEYS)}")
    value = record[given[0]]
    if given[0] == "prompt" and isinstance(value, str):
        return Prompt(number, text=value)
    if given[0] == "messages" and _all(value, dict):
        return Prompt(number, messages=value)
    if given[0] == "prompt_token_ids" and _all(value, int):
        return Prompt(number, token_ids=tuple(value))
    raise ConfigError(f"{where}: {given[0]} has the wrong type")


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _generate(engine: "Engine", jobs: list[Any]) -> Iterator[str]:
    from tqdm import tqdm

    from echokv.engine.offline import drive

    results = [_Result() for _ in jobs]
    written = 0
    with tqdm(
        total=len(jobs), desc="generating", unit="req", disable=not sys.stderr.isatty()
    ) as bar:
        for index, output in drive(engine, jobs):
            results[index].add(output)
            bar.update(output.finished)
            while written < len(results) and results[written].finished:
                yield results[written].as_json(written)
                written += 1


@contextmanager
def _naming(name: str, prompt: Prompt) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(
            f"{name}, line {prompt.line}: {error}", param=error.param, code=error.code
        ) from error


@contextmanager
def _opened(path: str, mode: str) -> Iterator[IO[str]]:
    """A file, or the standard stream for `-`, which stays open."""
    if path == "-":
        yield sys.stdin if mode == "r" else sys.stdout
        return
    try:
        file = Path(path).open(mode, encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {error.strerror}") from error
    with file:
        yield file
