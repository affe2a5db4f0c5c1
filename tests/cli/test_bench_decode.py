"""`echokv bench decode` on a small preset with the reference kernels; flags that contradict."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.bench.traces import made_up_trace

from echokv.bench.trace_format import save_trace
from echokv.cli.main import main

SMALL = "bench decode --preset small --num-layers 2 --device cpu --backend reference".split()


def run(tmp_path: Path, flags: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    assert main([*SMALL, *flags.split(), "--output-json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_steps_with_and_without_offload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(
        tmp_path,
        "--batch 2 --context-len 384 --compare --steps 3 --rounds 2 --warmup-steps 1"
        " --hit-rate 0.75 --device-pool-tokens 300",
    )
    offloaded, resident = result["variants"]["offloaded"], result["variants"]["resident"]
    assert result["layers"] == 2 and result["mode"] == "steps"
    assert offloaded["step_ms"]["count"] == resident["step_ms"]["count"] == 6
    assert offloaded["device_step_ms"]["count"] == 6
    # 16 of 64 rows replaced, for two requests; the pool holds less than their contexts.
    assert offloaded["recalled_rows_by_layer"] == [8 * 32] * 2
    assert offloaded["hit_rate_by_layer"] == [0.75] * 2
    assert resident["hit_rate_by_layer"] == [None] * 2
    assert offloaded["device_pool_tokens"] == 300 and offloaded["batch"] == 2
    assert offloaded["selections"].startswith("generated, 25.00%")
    assert result["ratio"]["step_ms"] > 0
    assert set(offloaded["hbm_bytes"]) == {"device pool", "index keys", "metadata"}
    text = capsys.readouterr().out
    assert "rows recalled a layer" in text and "offloaded / resident, step_ms" in text


def test_throughput_at_equal_bytes(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "--all-at-once --context-len 900-1000 --output-len 3 --compare --kv-hbm-gb 0.0017"
        " --num-requests 3 --kv-cache-dtype fp8_ds_mla --index-key-dtype fp8",
    )
    offloaded, resident = result["variants"]["offloaded"], result["variants"]["resident"]
    for variant in (offloaded, resident):
        assert variant["output_tokens"] == 9
        assert variant["kv_hbm_bytes"] <= 1_700_000
        assert variant["most_running"] <= variant["batch"]
        assert variant["selections"] == "real indexer"
    assert (offloaded["batch"], resident["batch"]) == (3, 2)
    assert (offloaded["steps"], resident["steps"]) == (3, 6), "fewer at once, in more waves"
    assert result["ratio"]["output_tokens_per_s"] > 0


def test_a_trace_as_selections(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace(made_up_trace(5, topk=16), path)
    flags = f"--trace {path} --context-len 500 --steps 2 --rounds 1 --no-offload"
    assert run(tmp_path, flags)["variants"]["resident"]["selections"].startswith("trace trace.npz")
    assert main([*SMALL, *f"--trace {path} --context-len 100 --no-offload".split()]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--preset none", "--preset 'none' is not one of"),
        ("--batch 0", "--batch must be at least 1, got 0"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--compare --no-offload", "leave --no-offload out"),
        ("--context-len 5-3", "lengths must be at least 1 and ascend"),
        ("--context-len many", "--context-len must be N or N-N"),
        ("--hit-rate 2", "--hit-rate must be in [0, 1]"),
        ("--hit-rate 0.9 --trace x.npz", "leave one out"),
        ("--num-requests 3", "--num-requests is for --all-at-once"),
        ("--kv-hbm-gb 0.0001 --context-len 300", "one request of"),
        ("--batch 4 --context-len 300 --device-pool-tokens 256", "--batch 4 needs a device pool"),
        ("--profile 5", "--profile lists GPU kernels"),
        ("--context-len 1000000", "--max-model-len"),
    ],
)
def test_flags_that_make_no_sense(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_captured_steps_decode_the_same_with_and_without_offload(tmp_path: Path) -> None:
    """On a GPU: graphs, fused ops, rows recalled beside products; the comparison is the gate."""
    path = tmp_path / "result.json"
    flags = (
        "bench decode --preset small --device cuda --batch 4 --context-len 700 --compare --steps 5"
        " --rounds 2 --hit-rate 0.75 --device-pool-tokens 600 --profile 3"
    )
    assert main([*flags.split(), "--output-json", str(path)]) == 0
    result = json.loads(path.read_text())
    # A row that comes back by chance may still be there.
    rates = result["variants"]["offloaded"]["hit_rate_by_layer"]
    assert rates == pytest.approx([0.75] * 4, abs=0.01)
    assert result["dtype"] == "bfloat16"
