"""`echokv bench trace` and `echokv bench quality` on the demo model, and flags that can't be."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import SMALL_ENGINE

from echokv.cli.main import main


def test_record_then_replay(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, result = tmp_path / "trace.npz", tmp_path / "result.json"
    workload = "--num-prompts 2 --input-len 150 --output-len 5".split()
    argv = ["bench", "trace", "record", str(demo_model), *SMALL_ENGINE, *workload]
    assert main([*argv, "--prompt-rows", "0", "--out", str(trace)]) == 0
    assert f"wrote {trace}" in capsys.readouterr().out
    argv = ["bench", "trace", "replay", str(trace), "--pools", "1/2,0.25", "--alphas", "0.5"]
    assert main([*argv, "--output-json", str(result), "--plot-dir", str(tmp_path / "plots")]) == 0
    written = json.loads(result.read_text())
    assert written["live_tokens"] == 154 + 153  # one is a step ahead
    assert [pool["device_slots"] for pool in written["pools"]] == [153, 76]
    for pool in written["pools"]:
        rates = {name: figures["hit_rate"] for name, figures in pool["policies"].items()}
        assert rates["belady"] >= max(rates["product"], rates["lru"])
        assert len(pool["policies"]["product"]["hit_rate_by_layer"]) == 4
    assert written["thresholds"]["num_decoded_rows"] == 8
    assert written["meta"]["workload"]["input_len"] == 150
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
    assert "| 1/4 | 76 |" in capsys.readouterr().out


def test_record_tasks(demo_model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    argv = ["bench", "trace", "record", str(demo_model), *SMALL_ENGINE, "--tasks", "passkey,needle"]
    sizes = "--num-prompts 3 --input-len 320 --output-len 3 --prompt-rows 0".split()
    assert main([*argv, *sizes, "--out", str(trace)]) == 0
    assert trace.stat().st_size > 1000


def test_quality(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, table, plot = tmp_path / "q.json", tmp_path / "q.md", tmp_path / "q.png"
    argv = ["bench", "quality", str(demo_model), "--tasks", "passkey", "--instances", "1"]
    argv += ["--lengths", "300", "--pools", "1/2", "--lossy", "clo-like"]
    files = ["--output-json", str(json_file), "--output-md", str(table), "--plot", str(plot)]
    assert main([*argv, *files]) == 0
    written = json.loads(json_file.read_text())
    assert written["lossless"] is True
    assert [row["kind"] for row in written["groups"][0]["rows"]] == [
        "resident",
        "offloaded",
        "lossy",
    ]
    assert table.read_text().startswith("| variant | 300 |")
    assert plot.stat().st_size > 1000
    assert "| offloaded, pool 1/2 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trace", "replay", "missing.npz"], "cannot read missing.npz"),
        (["trace", "replay", "x", "--policies", "magic"], "'magic' is not one of"),
        (["trace", "replay", "x", "--pools", "half"], "--pools must be shares"),
        (["trace", "replay", "x", "--pools", "3/2"], "--pools must be in (0, 1]"),
        (["trace", "replay", "x", "--alphas", "0"], "--alphas must be in (0, 1]"),
        (["quality", "MODEL", "--lossy", "guess"], "--lossy 'guess' is not one of"),
        (["quality", "MODEL", "--lengths", "4K"], "--lengths must be whole numbers"),
        (["quality", "MODEL", "--instances", "0"], "--instances must be at least 1"),
        (["quality", "MODEL", "--tasks", "chess", "--lengths", "300"], "task 'chess' is not one"),
        (["quality", "MODEL", "--tasks", ""], "no questions"),
    ],
)
def test_flags_that_cannot_be(
    demo_model: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(demo_model) if word == "MODEL" else word for word in argv]
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err
