"""Facts about the host's memory that `doctor` shows; reads, never changes anything.

What a plan may use is `memory.host_memory`'s to say; this adds what explains its speed and limits.
"""

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from echokv.memory.host_memory import HostMemory

_KIB = 2**10


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node; a node without processors has an empty `cpus`."""

    node: int
    cpus: str  # in the kernel's list form, such as 0-15,32-47
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class HostMemoryFacts:
    """The memory that a host pool comes from, and what limits it. Bytes; None: not said."""

    total_bytes: int | None
    available_bytes: int
    cgroup_left_bytes: int | None  # None: no limit
    memlock_limit_bytes: int | None  # None: unlimited
    transparent_hugepages: str | None  # always, madvise or never
    hugepages_reserved: int | None  # explicit huge pages, which echokv doesn't need
    numa_nodes: tuple[NumaNode, ...]


def host_memory(root: Path = Path("/")) -> HostMemoryFacts:
    """Read the memory facts.

    Args:
        root: where `proc` and `sys` are; tests give a folder of their own.
    """
    usable = HostMemory.read(root)
    meminfo = _read(root / "proc/meminfo")
    total = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    reserved = re.search(r"^HugePages_Total:\s+(\d+)", meminfo, re.MULTILINE)
    huge = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostMemoryFacts(
        total_bytes=int(total[1]) * _KIB if total else None,
        available_bytes=usable.available,
        cgroup_left_bytes=usable.cgroup,
        memlock_limit_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        transparent_hugepages=huge[1] if huge else None,
        hugepages_reserved=int(reserved[1]) if reserved else None,
        numa_nodes=_numa_nodes(root / "sys/devices/system/node"),
    )


def _numa_nodes(directory: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for path in directory.glob("node[0-9]*"):
        total = re.search(r"MemTotal:\s+(\d+) kB", _read(path / "meminfo"))
        nodes.append(
            NumaNode(
                node=int(path.name.removeprefix("node")),
                cpus=_read(path / "cpulist").strip(),
                total_bytes=int(total[1]) * _KIB if total else 0,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.node))


def _read(path: Path) -> str:
    """A file's text; empty where the machine has no such file."""
    return path.read_text() if path.is_file() else ""
