"""`echokv bench`: the demo model offline, a small server over HTTP, flags that contradict."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bench.fake_server import FakeServer, serving
from tests.cli.conftest import SMALL_ENGINE

from echokv.cli.main import main


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    with serving(fake) as base_url:
        yield base_url


def test_throughput_on_the_demo_model(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.json"
    workload = "--num-prompts 3 --input-len 150 --output-len 4".split()
    argv = ["bench", "throughput", str(demo_model), *SMALL_ENGINE, *workload]
    assert main([*argv, "--output-json", str(result)]) == 0
    written = json.loads(result.read_text())
    assert written["num_requests"] == 3
    assert written["total_input_tokens"] == 450
    assert written["total_output_tokens"] == 12
    assert written["cache"]["device_pool_slots"] == 256
    assert written["cache"]["selected_rows"] > 0
    assert written["config"]["backend"] in ("reference", "triton")
    assert written["workload"]["dataset_name"] == "random"
    assert written["commit"] is None or len(written["commit"]) >= 12
    assert "Throughput: " in capsys.readouterr().out


def test_throughput_of_a_file_of_text(demo_model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a prompt\nanother prompt\n")
    result = tmp_path / "result.json"
    workload = ["--dataset-name", "file", "--dataset-path", str(prompts), "--output-len", "2"]
    argv = ["bench", "throughput", str(demo_model), *SMALL_ENGINE, *workload]
    assert main([*argv, "--num-warmups", "0", "--output-json", str(result)]) == 0
    assert json.loads(result.read_text())["total_output_tokens"] == 4


VLLM_KEYS = {
    "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "output_throughput", "total_token_throughput", "input_lens",
    "output_lens", "ttfts", "itls", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests",
} | {
    f"{statistic}_{latency}_ms"
    for statistic in ("mean", "median", "std", "p99")
    for latency in ("ttft", "tpot", "itl", "e2el")
}  # fmt: skip


def test_serve_over_http(
    fake: FakeServer, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.api_key = "secret"
    result = tmp_path / "result.json"
    argv = ["bench", "serve", "--base-url", url, "--api-key", "secret", "--max-concurrency", "2"]
    workload = "--num-prompts 5 --input-len 16 --output-len 3 --vocab-size 10".split()
    assert main([*argv, *workload, "--output-json", str(result)]) == 0
    text = capsys.readouterr().out
    assert "Serving Benchmark Result" in text
    written = json.loads(result.read_text())
    assert set(written) >= VLLM_KEYS
    assert written["completed"] == written["num_prompts"] == 5
    assert written["total_input_tokens"] == 80
    assert written["total_output_tokens"] == 15
    assert written["model_id"] == "fake"
    assert written["machine"]["cpus"] >= 1
    assert len(fake.bodies) == 6  # and one to warm up
    assert "secret" not in result.read_text()


def test_a_failed_request_makes_the_status_1(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2]}\n{"prompt": [13]}\n')
    argv = ["bench", "serve", "--base-url", url, "--dataset-name", "file", "--num-warmups", "0"]
    assert main([*argv, "--dataset-path", str(prompts), "--output-len", "2"]) == 1
    captured = capsys.readouterr()
    assert "no thirteens" in captured.err
    assert "Failed requests:                         1" in captured.out


def test_a_trace_is_replayed_at_its_own_times(fake: FakeServer, url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [5, 6]}\n'
        '{"timestamp": 200, "input_length": 512, "output_length": 1, "hash_ids": [5]}\n'
    )
    argv = ["bench", "serve", "--base-url", url, "--trace", str(trace), "--vocab-size", "10"]
    assert main([*argv, "--request-rate", "trace", "--num-warmups", "0"]) == 0
    first, second = fake.bodies
    assert (len(first["prompt"]), len(second["prompt"])) == (600, 512)
    assert first["prompt"][:512] == second["prompt"]
    assert fake.received_s[1] - fake.received_s[0] == pytest.approx(0.2, abs=0.15)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--request-rate", "fast"], "--request-rate must be a number"),
        (["--request-rate", "0"], "--request-rate must be positive"),
        (["--request-rate", "trace"], "needs a workload with arrival times"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles must be numbers"),
        (["--metric-percentiles", "101"], "in [0, 100]"),
        (["--num-prompts", "0"], "--num-prompts must be positive"),
        (["--dataset-name", "file"], "needs --dataset-path"),
        (["--trace", "x", "--dataset-name", "random"], "give one form"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        ([], "no model list from http://127.0.0.1:9"),
    ],
)
def test_flags_that_cannot_be_are_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *argv]) == 2
    assert message in capsys.readouterr().err
