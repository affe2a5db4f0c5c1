"""`echokv generate`: prompts in three forms, JSONL in the prompts' order, errors with the line."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import SMALL_ENGINE

from echokv.cli.generate import Prompt, read_prompts
from echokv.cli.main import main
from echokv.errors import ConfigError


def generate(demo_model: Path, *argv: str) -> int:
    return main(["generate", str(demo_model), *SMALL_ENGINE, "--temperature", "0", *argv])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_in_every_form_come_back_in_order(demo_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "A longer prompt, of many bytes, so that it takes a while"}\n'
        '{"prompt_token_ids": [72, 105]}\n\n'
        '{"messages": [{"role": "user", "content": "Hi"}]}\n'
        '{"prompt": "Hi"}\n'
    )
    out = tmp_path / "out.jsonl"
    argv = ["--max-tokens", "3", "--ignore-eos", "--logprobs", "1"]
    assert generate(demo_model, "--prompts", str(prompts), "--output", str(out), *argv) == 0
    written = records(out)
    assert [record["index"] for record in written] == [0, 1, 2, 3]
    assert [len(record["token_ids"]) for record in written] == [3] * 4
    assert {record["finish_reason"] for record in written} == {"length"}
    assert [len(record["logprobs"]) for record in written] == [3] * 4
    # greedy: the likeliest token is the one taken
    for record in written:
        for token, entry in zip(record["token_ids"], record["logprobs"], strict=True):
            assert entry["token_id"] == token
            assert entry["top"] == {str(token): entry["logprob"]}
    assert written[1]["num_prompt_tokens"] == 2
    assert written[2]["num_prompt_tokens"] > written[3]["num_prompt_tokens"]


def test_stdin_to_stdout(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('Hi\n{"not": "parsed"}\n'))
    assert generate(demo_model, "--prompts", "-", "--max-tokens", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]


def test_a_prompt_that_cannot_run_is_named_before_anything_runs(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("short\n\n" + "long " * 400 + "\n")
    assert generate(demo_model, "--prompts", str(prompts), "--max-tokens", "1") == 2
    captured = capsys.readouterr()
    assert f"{prompts}, line 3: " in captured.err
    assert "1024" in captured.err
    assert captured.out == ""


def test_a_file_that_is_not_there_is_one_line(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(demo_model, "--prompts", str(tmp_path / "none.txt")) == 2
    assert "none.txt: No such file" in capsys.readouterr().err


def test_lines_become_prompts() -> None:
    assert read_prompts([" a \n", "\n", "b\r\n"], "f", jsonl=False) == [
        Prompt(1, text=" a "),
        Prompt(3, text="b"),
    ]
    assert read_prompts(['{"prompt_token_ids": [1, 2]}'], "f", jsonl=True) == [
        Prompt(1, token_ids=(1, 2))
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        "{}",
        '{"prompt": 3}',
        '{"prompt_token_ids": [1.5]}',
        '{"prompt_token_ids": [true]}',
        '{"messages": "Hi"}',
        '{"prompt": "a", "messages": []}',
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="f, line 2: "):
        read_prompts(['{"prompt": "fine"}\n', line], "f", jsonl=True)


def test_an_empty_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(["\n", "  \n"], "f", jsonl=False)


def test_bytes_that_are_not_utf8_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9\n")
    with path.open(encoding="utf-8") as file, pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(file, str(path), jsonl=False)
