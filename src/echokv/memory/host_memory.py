"""How much host memory there is, from /proc, /sys and the control group; numbers only."""

from dataclasses import dataclass
from pathlib import Path

from echokv.errors import CapacityError
from echokv.log import get_logger

logger = get_logger(__name__)

_GIB = 2**30
_UNLIMITED = 2**60
"""Control groups without a limit say "max" (v2) or a number near 2^63 (v1)."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes that could be taken now.

    `available` is the kernel's MemAvailable; `cgroup` what the control group leaves, None without
    a limit. Some virtual machines grow with use, so that MemAvailable says too little; a control
    group's limit is a promise.
    """

    available: int
    cgroup: int | None

    @property
    def usable(self) -> int:
        """What a plan should go by: the lower of the two."""
        return self.available if self.cgroup is None else min(self.available, self.cgroup)

    @classmethod
    def read(cls, root: Path = Path("/")) -> "HostMemory":
        """Read this machine's figures; `root` stands in for / in tests."""
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
        return cls(available=fields["MemAvailable"], cgroup=_cgroup_bytes(root))


def require_host_bytes(
    nbytes: int, *, what: str, flag: str, memory: HostMemory | None = None
) -> None:
    """Refuse before touching what the machine can't give.

    When only MemAvailable is too low but a control group has room, this warns and goes on.

    Raises:
        CapacityError: with both numbers and the flag.
    """
    memory = memory or HostMemory.read()
    if nbytes <= memory.usable:
        return
    message = (
        f"the {what} needs {nbytes / _GIB:.2f} GiB of host memory, {memory.usable / _GIB:.2f} GiB"
        f" are available"
    )
    if memory.cgroup is None or nbytes > memory.cgroup:
        raise CapacityError(f"{message}; lower {flag}")
    logger.warning(
        "%s by MemAvailable, but the control group leaves %.2f GiB: going on",
        message,
        memory.cgroup / _GIB,
    )


def online_numa_nodes(root: Path = Path("/")) -> list[int]:
    """Ids of the NUMA nodes that have memory; [0] when the kernel doesn't say."""
    file = root / "sys/devices/system/node/has_memory"
    if not file.is_file():
        return [0]
    nodes: list[int] = []
    for part in file.read_text().strip().split(","):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


def _cgroup_bytes(root: Path) -> int | None:
    """What this process's control group leaves; None without a limit. The tightest group counts."""
    file = root / "proc/self/cgroup"
    if not file.is_file():
        return None
    left: list[int] = []
    for line in file.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _group_bytes(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            left += _group_bytes(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(left, default=None)


def _group_bytes(base: Path, path: str, limit_name: str, usage_name: str) -> list[int]:
    """Bytes left in the group at path and in each group above it that has a limit."""
    left = []
    group = base / path.lstrip("/")
    for candidate in (group, *group.parents):
        limit_file, usage_file = candidate / limit_name, candidate / usage_name
        if limit_file.is_file() and usage_file.is_file():
            text = limit_file.read_text().strip()
            limit = _UNLIMITED if text == "max" else int(text)
            if limit < _UNLIMITED:
                left.append(max(0, limit - int(usage_file.read_text())))
        if candidate == base:
            break
    return left
