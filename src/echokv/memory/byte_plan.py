"""The byte budget as it was decided: shown at start-up, compared with what was really allocated."""

from dataclasses import dataclass

from rich.table import Table

from echokv.errors import CapacityError
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """One entry of the budget."""

    name: str
    place: str  # "HBM" or "host"; a CPU's memory is called host throughout
    nbytes: int
    tokens: int | None  # tokens a layer that it holds, where that means something
    is_bound: bool = False  # an upper bound, not an exact size


@dataclass(frozen=True, kw_only=True)
class BytePlan:
    """What one engine allocates. Built by `plan.make_plan`."""

    lines: tuple[PlanLine, ...]
    device_limit_bytes: int | None  # free before anything was loaded; None: no separate memory
    host_limit_bytes: int
    offload: bool
    host_slots: int  # N_H, whole blocks
    device_slots: int  # N_G a layer; equal to host_slots without offload
    max_model_len: int
    max_running: int  # requests that may run at once

    @property
    def num_host_blocks(self) -> int:
        """Blocks of 64 tokens; also index-key pages."""
        return self.host_slots // BLOCK_TOKENS

    @property
    def max_concurrency(self) -> int:
        """Requests of max_model_len that can run at once."""
        blocks_each = blocks_for(self.max_model_len)
        return min(self.max_running, self.num_host_blocks // blocks_each)

    def nbytes(self, name: str) -> int:
        """Bytes of one line, 0 when there is none of that name."""
        return sum(line.nbytes for line in self.lines if line.name == name)

    def total(self, place: str) -> int:
        """Bytes in one place."""
        return sum(line.nbytes for line in self.lines if line.place == place)

    def render(self) -> Table:
        """The start-up table."""
        concurrency = f"{self.max_concurrency} requests of {self.max_model_len} tokens"
        table = Table(title="Byte budget", caption=f"maximum concurrency: {concurrency}")
        table.add_column("what")
        table.add_column("where")
        table.add_column("GiB", justify="right")
        table.add_column("tokens", justify="right")
        for line in self.lines:
            tokens = "" if line.tokens is None else f"{line.tokens:,}"
            bound = "<= " if line.is_bound else ""
            table.add_row(line.name, line.place, f"{bound}{line.nbytes / _GIB:.3f}", tokens)
        table.add_section()
        for place, limit in (("HBM", self.device_limit_bytes), ("host", self.host_limit_bytes)):
            if limit is not None:
                used = self.total(place) / _GIB
                table.add_row("total", place, f"{used:.3f}", f"of {limit / _GIB:.3f} GiB")
        return table

    def verify(self, allocated: dict[str, int]) -> None:
        """Compare with what was really allocated.

        Args:
            allocated: bytes by line name; lines that are left out aren't compared.

        Raises:
            CapacityError: a name that isn't in the plan, or bytes that differ from it (exceed it,
                where the line is an upper bound).
        """
        planned = {line.name: line for line in self.lines}
        for name, nbytes in allocated.items():
            line = planned.get(name)
            if line is None:
                raise CapacityError(
                    f"{nbytes} bytes were allocated for {name!r}, which the plan doesn't have:"
                    f" {', '.join(planned)}"
                )
            if nbytes > line.nbytes or (nbytes < line.nbytes and not line.is_bound):
                raise CapacityError(
                    f"{nbytes} bytes were allocated for the {name},"
                    f" {'at most ' if line.is_bound else ''}{line.nbytes} were planned"
                )


def gib(nbytes: int) -> str:
    """Bytes for a message."""
    return f"{nbytes / _GIB:.2f} GiB"
