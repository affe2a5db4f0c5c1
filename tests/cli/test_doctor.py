"""`echokv doctor`: its JSON, its text, the facts that it reads from /proc and /sys."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import SMALL_ENGINE

from echokv.cli import doctor
from echokv.cli.machine import NumaNode, host_memory
from echokv.cli.main import main
from echokv.memory import managed

GIB = 2**30


def report(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json", *argv]) == status
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_json_says_what_can_run_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert found["versions"]["torch"]
    assert found["backends"]["reference"] == {
        "available": True,
        "device": found["backends"]["reference"]["device"],
        "reason": None,
    }
    for state in (found["backends"]["triton"], found["hopper"]):
        assert state["available"] is (state["reason"] is None)
    assert len(found["devices"]) == torch.cuda.device_count()
    assert found["memory"]["total_bytes"] > 0
    assert found["plan"] is None
    assert found["plan_error"] is None


def test_a_backend_that_cannot_run_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("triton runs here")
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    state = report(capsys)["backends"]["triton"]
    assert not state["available"]
    assert "TRITON_INTERPRET" in state["reason"]


@pytest.mark.parametrize("refusal", [None, "no such thing here"])
def test_what_memory_a_host_pool_takes(
    refusal: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = report(capsys)["host_pool"]
    assert (pool["kind"] == "plain") is not torch.cuda.is_available()
    monkeypatch.setattr(managed, "managed_refusal", lambda device: refusal)
    assert doctor._host_pool(torch.device("cuda")) == {
        "kind": "pinned" if refusal else "managed", "reason": refusal,
    }  # fmt: skip


def test_the_hopper_wheels_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    hopper = report(capsys)["hopper"]
    assert not hopper["available"]
    assert "no CUDA device" in hopper["reason"]
    assert set(hopper["packages"]) == {"sgl-flash-mla", "sgl-deep-gemm", "apache-tvm-ffi"}


def test_the_plan_of_a_model(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = report(capsys, str(demo_model), *SMALL_ENGINE)["plan"]
    assert plan["device_slots"] == 256
    assert plan["max_running"] == 2
    host_pool = next(line for line in plan["lines"] if line["name"] == "host pool")
    assert 0 < host_pool["nbytes"] <= 0.02 * GIB
    assert host_pool["tokens"] == plan["host_slots"]


def test_a_plan_that_does_not_fit_is_reported_beside_the_machine(
    demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, str(demo_model), "--host-pool-gib", "1000000", status=2)
    assert "--host-pool-gib" in found["plan_error"]
    assert found["plan"] is None
    assert found["versions"]


def test_the_text_names_every_section(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(demo_model), *SMALL_ENGINE]) == 0
    text = capsys.readouterr().out
    for word in ("software", "devices", "backends", "host memory", "Byte budget", "host pool"):
        assert word in text


def fake_root(root: Path, *, hugepages: str = "always [madvise] never\n") -> Path:
    files = {
        "proc/meminfo": "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\nHugePages_Total: 7\n",
        "sys/kernel/mm/transparent_hugepage/enabled": hugepages,
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  2097152 kB\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:  6291456 kB\n",
        "sys/devices/system/node/node10/cpulist": "\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_facts_are_read_from_proc_and_sys(tmp_path: Path) -> None:
    memory = host_memory(fake_root(tmp_path))
    assert memory.total_bytes == 8 * GIB
    assert memory.available_bytes == 4 * GIB
    assert memory.cgroup_left_bytes is None
    assert memory.transparent_hugepages == "madvise"
    assert memory.hugepages_reserved == 7
    assert memory.numa_nodes == (
        NumaNode(node=0, cpus="0-3", total_bytes=2 * GIB),
        NumaNode(node=10, cpus="", total_bytes=6 * GIB),
    )


def test_facts_that_the_machine_does_not_give_are_none(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
    memory = host_memory(tmp_path)
    assert memory.total_bytes is None
    assert memory.transparent_hugepages is None
    assert memory.numa_nodes == ()
