"""CUDA C++ to cubins: NVRTC, with the result kept on disk.

Knows sources and compilers, nothing of launching. Compiling needs no GPU: a cubin is keyed by its
source, its options and the version of NVRTC, so a cached one is exactly what would be compiled.
"""

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from echokv.errors import KernelUnavailable
from echokv.log import get_logger

logger = get_logger(__name__)

FOLDER = Path(__file__).parent
ARCHITECTURE = "sm_90a"
OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class KernelUsage:
    """What ptxas says that a kernel takes."""

    name: str
    registers: int
    stack_bytes: int
    spilled_bytes: int
    serialised: bool  # its wgmma instructions wait for each other, whatever the source says


def cache_folder() -> Path:
    """Where cubins are kept: $ECHOKV_CACHE_DIR, else ~/.cache/echokv."""
    named = os.environ.get("ECHOKV_CACHE_DIR")
    return Path(named) if named else Path.home() / ".cache" / "echokv"


def load_cubin(name: str) -> bytes:
    """The cubin of one source of this folder, compiled now unless it is on disk.

    Args:
        name: the file's name without ".cu".

    Raises:
        KernelUnavailable: NVRTC is missing, or the source doesn't compile; with its log.
    """
    path = cache_folder() / f"{name}-{_key(name)}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin, _ = compile_cubin(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)  # whole or not at all, whoever else is compiling
    logger.info("kernels: compiled %s.cu for %s into %s", name, ARCHITECTURE, path)
    return cubin


def compile_cubin(name: str) -> tuple[bytes, list[KernelUsage]]:
    """Compile one source, and say what each of its kernels takes.

    Raises:
        KernelUnavailable: see `load_cubin`.
    """
    nvrtc = _nvrtc()
    source = (FOLDER / f"{name}.cu").read_bytes()
    headers = [path.read_bytes() for path in _headers()]
    names = [path.name.encode() for path in _headers()]
    error, program = nvrtc.nvrtcCreateProgram(
        source, f"{name}.cu".encode(), len(headers), headers, names
    )
    _require(nvrtc, error, name)
    try:
        options = [option.encode() for option in OPTIONS]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelUnavailable(f"{name}.cu doesn't compile for {ARCHITECTURE}:\n{log}")
        cubin = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, parse_usage(log)


def parse_usage(log: str) -> list[KernelUsage]:
    """Read `ptxas -v`: one entry a kernel."""
    found = []
    for part in re.split(r"Function properties for ", log)[1:]:
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        ).groups()  # fmt: skip
        registers = re.search(r"Used (\d+) registers", part)[1]
        name = part.split(maxsplit=1)[0]
        serialised = re.search(rf"are serialized .*'{name}'", log) is not None
        spilled = int(stores) + int(loads)
        found.append(KernelUsage(name, int(registers), int(stack), spilled, serialised))
    return found


def _headers() -> list[Path]:
    """What sources of this folder may include."""
    return sorted(FOLDER.glob("*.cuh"))


def _key(name: str) -> str:
    nvrtc = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    digest = hashlib.sha256(f"{OPTIONS} NVRTC {major}.{minor}".encode())
    for path in (FOLDER / f"{name}.cu", *_headers()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _nvrtc():
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise KernelUnavailable(
            "--backend cuda compiles with NVRTC through cuda-bindings, which a CUDA build of torch"
            f" brings: {error}"
        ) from error
    return nvrtc


def _text(size, get, program) -> bytes:
    """A result of NVRTC's, in a buffer of the size that it asks for."""
    _, count = size(program)
    buffer = b" " * count
    get(program, buffer)
    return buffer


def _require(nvrtc, error, name: str) -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, text = nvrtc.nvrtcGetErrorString(error)
        raise KernelUnavailable(f"NVRTC can't take {name}.cu: {text.decode()}")
