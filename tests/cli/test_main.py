"""The command line as a whole: exit statuses and one-line errors."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from echokv.cli import demo_model
from echokv.cli.main import build_parser, main
from echokv.errors import CapacityError

COMMANDS = (["serve"], ["generate"], ["bench", "throughput"], ["bench", "serve"], ["doctor"])


def exit_status(*argv: str) -> int:
    """What the process would exit with, argparse's own exits included."""
    try:
        return main(argv)
    except SystemExit as stop:
        return cast(int, stop.code)


@pytest.mark.parametrize("command", [*COMMANDS, ["demo-model"]], ids=" ".join)
def test_every_command_explains_itself(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(*command, "--help") == 0
    assert f"usage: echokv {' '.join(command)}" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unknown_flags_are_errors(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--prompts", "-"] if command == ["generate"] else []
    assert exit_status(*command, *needed, "--no-such-flag") == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("serve", "dir", "--max-num", "3") == 2
    assert "--max-num" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["bench"]])
def test_a_missing_or_unknown_command_is_an_error(argv: list[str]) -> None:
    assert exit_status(*argv) == 2


def one_line_error(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("serve") == 2
    assert one_line_error(capsys).startswith("echokv serve: error: no model given")


@pytest.mark.parametrize("command", [["serve"], ["bench", "throughput"]], ids=" ".join)
def test_a_directory_without_a_checkpoint_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = ["--port", "0"] if command == ["serve"] else []
    assert exit_status(*command, str(tmp_path / "none"), *port) == 2
    assert "none/config.json does not exist" in one_line_error(capsys)


def test_contradicting_values_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("serve", "dir", "--max-num-batched-tokens", "3") == 2
    assert "--max-num-batched-tokens 3 is below --max-num-seqs 64" in one_line_error(capsys)


def replace_run(monkeypatch: pytest.MonkeyPatch, failure: Callable[[], BaseException]) -> None:
    def run(_: object) -> int:
        raise failure()

    monkeypatch.setattr(demo_model, "run", run)


def test_every_error_of_ours_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_run(monkeypatch, lambda: CapacityError("needs 3 GiB, 2 GiB are free"))
    assert main(["demo-model", "x"]) == 2
    assert one_line_error(capsys) == "echokv demo-model: error: needs 3 GiB, 2 GiB are free"


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch, KeyboardInterrupt)
    assert main(["demo-model", "x"]) == 130


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_run(monkeypatch, lambda: ZeroDivisionError("fault"))
    with pytest.raises(ZeroDivisionError):
        main(["demo-model", "x"])


def test_the_parser_is_built_without_torch() -> None:
    code = (
        "import sys; from echokv.cli.main import build_parser; build_parser();"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("--version") == 0
    assert capsys.readouterr().out.startswith("echokv 0.")
    assert build_parser().prog == "echokv"


def test_a_demo_model_does_not_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert exit_status("demo-model", str(tmp_path)) == 2
    assert "not an empty directory" in one_line_error(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
