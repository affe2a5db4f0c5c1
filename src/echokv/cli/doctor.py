"""`echokv doctor`: what this machine can run and why not; with a model, that model's byte plan."""

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from echokv.cli import flags
from echokv.cli.machine import host_memory
from echokv.config import EngineConfig
from echokv.errors import EchoKVError, KernelUnavailable

if TYPE_CHECKING:
    from rich.console import Console

    from echokv.memory.byte_plan import BytePlan

_GIB = 2**30
_BACKENDS = ("reference", "triton", "cuda")
_HOPPER = ("sgl-flash-mla", "sgl-deep-gemm", "apache-tvm-ffi")
_HOPPER_CAPABILITY = (9, 0)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `doctor` command."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can run, and why not",
        description="Show versions, devices, backends and memory limits. With a model, also its"
        " byte plan under the engine flags given; nothing is allocated.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    flags.add_engine_flags(parser, model_required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; exit status 2 when a model was named and its plan is impossible here."""
    report = examine()
    plan, problem = None, None
    if flags.model_dir(args) is not None:
        try:
            plan = _plan(flags.engine_config(args))
        except EchoKVError as error:
            problem = str(error)
    if args.json:
        report |= {"plan": None if plan is None else _plan_json(plan), "plan_error": problem}
        print(json.dumps(report, indent=2))
    else:
        _print(report, plan)
    if problem is not None:
        print(f"echokv doctor: no plan: {problem}", file=sys.stderr)
    return 0 if problem is None else 2


def examine() -> dict[str, Any]:
    """Everything about the machine, ready for JSON. Sizes are bytes."""
    import torch

    from echokv.bench import report

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "versions": report.versions(),
        "commit": report.commit(),
        "machine": report.machine(),
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "backends": {name: _backend(name, device) for name in _BACKENDS},
        "hopper": _hopper(),
        "memory": dataclasses.asdict(host_memory()),
        "host_pool": _host_pool(device),
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
        "free_bytes": free,
        "total_bytes": total,
    }


def _host_pool(device: Any) -> dict[str, str | None]:
    """What memory a host pool takes by default, and why no better one."""
    from echokv.memory.managed import managed_refusal

    if device.type == "cpu":
        return {"kind": "plain", "reason": "no CUDA device"}
    refusal = managed_refusal(device)
    return {"kind": "pinned" if refusal else "managed", "reason": refusal}


def _backend(name: str, device: Any) -> dict[str, Any]:
    from echokv.kernels.registry import load_kernels

    try:
        load_kernels(name, device)
    except KernelUnavailable as error:
        return {"available": False, "device": str(device), "reason": str(error)}
    return {"available": True, "device": str(device), "reason": None}


def _hopper() -> dict[str, Any]:
    """The extra wheels for Hopper, and what keeps them from being used."""
    import torch

    from echokv.bench.report import package_version
    from echokv.kernels.libraries import (
        find_nvcc,
        library_problem,
        load_deep_gemm,
        load_flash_mla,
    )

    found = {name: package_version(name) for name in _HOPPER}
    missing = [name for name, version in found.items() if version is None]
    reasons = []
    if not torch.cuda.is_available():
        reasons.append("no CUDA device")
    elif torch.cuda.get_device_capability() != _HOPPER_CAPABILITY:
        capability = "{}.{}".format(*torch.cuda.get_device_capability())
        reasons.append(f"the device has capability {capability}, not 9.0")
    if missing:
        reasons.append(f"not installed: {', '.join(missing)} (pip install 'echokv[hopper]')")
    if find_nvcc() is None:
        reasons.append("no nvcc on PATH or in CUDA_HOME, which sgl-deep-gemm compiles with")
    return {
        "available": not reasons,
        "packages": found,
        "nvcc": find_nvcc(),
        "reason": "; ".join(reasons) or None,
        "libraries": {
            "flashmla": library_problem(load_flash_mla) or "loads",
            "deepgemm": library_problem(load_deep_gemm) or "loads",
        },
    }


def _plan(config: EngineConfig) -> "BytePlan":
    from echokv.engine.build import plan_engine

    return plan_engine(config)[-1]


def _plan_json(plan: "BytePlan") -> dict[str, Any]:
    """The plan's fields, and the concurrency that follows from them."""
    return dataclasses.asdict(plan) | {"max_concurrency": plan.max_concurrency}


def _print(report: dict[str, Any], plan: "BytePlan | None") -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    _print_rows(console, "software", _software_rows(report))
    _print_rows(console, "devices", _device_rows(report))
    _print_rows(console, "backends", _backend_rows(report))
    pool = (report["host_pool"]["kind"], report["host_pool"]["reason"])
    rows = [("host pool", ": ".join(word for word in pool if word))]
    _print_rows(console, "host memory", rows + _memory_rows(report["memory"]))
    if plan is not None:
        console.print(plan.render())


def _print_rows(console: "Console", title: str, rows: list[tuple[str, str]]) -> None:
    console.print(f"[bold]{title}[/bold]")
    for name, value in rows:
        console.print(f"  {name:<24} {value}", markup=False)


def _software_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, version or "not installed") for name, version in report["versions"].items()]
    return [*rows, ("commit", report["commit"] or "not in a git checkout")]


def _device_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine = report["machine"]
    rows = [("cpu", f"{machine['cpu']}, {machine['cpus']} usable")]
    for index, device in enumerate(report["devices"]):
        free = f"{_gib(device['free_bytes'])} of {_gib(device['total_bytes'])} free"
        name = f"{device['name']}, capability {device['capability']}"
        rows.append((f"cuda:{index}", f"{name}, {free}"))
    if not report["devices"]:
        rows.append(("cuda", f"no device (torch built for CUDA {machine['cuda'] or 'none'})"))
    return rows


def _backend_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (name, f"yes, on {state['device']}" if state["available"] else f"no: {state['reason']}")
        for name, state in report["backends"].items()
    ]
    hopper = report["hopper"]
    rows.append(("hopper wheels", "yes" if hopper["available"] else f"no: {hopper['reason']}"))
    return [*rows, *hopper["libraries"].items()]


def _memory_rows(memory: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("total", _gib(memory["total_bytes"])),
        ("available", _gib(memory["available_bytes"])),
        ("left in the cgroup", _gib(memory["cgroup_left_bytes"], none="no limit")),
        ("memlock limit", _gib(memory["memlock_limit_bytes"], none="unlimited")),
        ("transparent huge pages", memory["transparent_hugepages"] or "unknown"),
    ]
    rows += [
        (f"numa node {node['node']}", f"{_gib(node['total_bytes'])}, cpus {node['cpus'] or 'none'}")
        for node in memory["numa_nodes"]
    ]
    return rows


def _gib(nbytes: int | None, *, none: str = "unknown") -> str:
    return none if nbytes is None else f"{nbytes / _GIB:.2f} GiB"
