"""Every Triton kernel compiles for Hopper, without a GPU and without spilling registers.

Run as a script it compiles and prints what it found: TRITON_INTERPRET, which the other tests need,
makes `triton.jit` return interpreted functions, so this happens in a process without it.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = "echokv.kernels.triton"
ARCHITECTURE = 90


def declared() -> list[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    """(module, kernel, signature, options) of every entry of every COMPILE_SIGNATURES."""
    found = []
    for info in pkgutil.iter_modules(importlib.import_module(FOLDER).__path__):
        module = importlib.import_module(f"{FOLDER}.{info.name}")
        for kernel, signature, *options in getattr(module, "COMPILE_SIGNATURES", ()):
            found.append((info.name, kernel, signature, options[0] if options else {}))
    return found


def undeclared() -> list[str]:
    """Kernels that no table names and that no declared kernel calls, by name."""
    from triton import JITFunction

    named = {kernel.fn.__qualname__ for _, kernel, _, _ in declared()}
    missing, called = [], ""
    for info in pkgutil.iter_modules(importlib.import_module(FOLDER).__path__):
        module = importlib.import_module(f"{FOLDER}.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                called += value.src
                if value.fn.__module__ == module.__name__:
                    missing.append(name)
    return [
        name
        for name in missing
        if name not in named and len(re.findall(rf"\b{name}\(", called)) < 2
    ]


def compile_one(
    module: str, kernel: Any, signature: dict[str, Any], options: dict[str, int]
) -> dict[str, Any]:
    """Compile one kernel to a cubin, and ask ptxas what it needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: kind if is_type(kind) else "constexpr" for name, kind in signature.items()}
    # As in a real launch: allocations are aligned, and so are the sizes marked ":16".
    aligned = [i for i, kind in enumerate(types.values()) if kind[0] == "*" or kind[-3:] == ":16"]
    source = ASTSource(
        fn=kernel,
        signature={name: kind.removesuffix(":16") for name, kind in types.items()},
        constexprs={name: kind for name, kind in signature.items() if not is_type(kind)},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target = GPUTarget("cuda", ARCHITECTURE, 32)
    compiled = triton.compile(source, target=target, options=options)
    usage = ptxas_usage(compiled.asm["ptx"])
    return {
        "kernel": f"{module}.{kernel.fn.__name__}",
        "types": " ".join(kind for kind in types.values() if kind != "constexpr"),
        "cubin_bytes": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        **usage,
    }


def is_type(kind: Any) -> bool:
    """Whether a table's entry is an argument type ("i32:16": a multiple of 16), not a constexpr."""
    return isinstance(kind, str) and re.fullmatch(r"\*?(i|u|fp|bf)\d\w*(:16)?", kind) is not None


def ptxas_usage(ptx: str) -> dict[str, int]:
    """Registers and spilled bytes, from the ptxas that comes with Triton."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        report = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{ARCHITECTURE}a", str(source),
             "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    stores = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.findall(r"Used (\d+) registers", report)
    assert stores and registers, f"ptxas said something else: {report}"
    return {
        "spilled_bytes": sum(int(a) + int(b) for a, b in stores),
        "registers": max(map(int, registers)),
    }


def main() -> None:
    """Compile everything and print one JSON object."""
    with ThreadPoolExecutor(2) as pool:
        kernels = list(pool.map(lambda entry: compile_one(*entry), declared()))
    print(json.dumps({"kernels": kernels, "undeclared": undeclared()}))


def test_every_kernel_compiles_for_hopper_without_spills() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["undeclared"] == [], "kernels that no COMPILE_SIGNATURES names"
    assert len(report["kernels"]) >= 15
    spilled = [entry for entry in report["kernels"] if entry["spilled_bytes"]]
    assert spilled == []
    # What one thread block can have on Hopper.
    assert all(entry["shared_bytes"] <= 227 * 1024 for entry in report["kernels"])


if __name__ == "__main__":
    main()
