"""What attention and the engine may ask of a KV cache, offloaded or not."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from echokv.memory.slots import DeviceSlots, HostSlots


@dataclass(frozen=True, kw_only=True)
class LayerCounters:
    """What one layer's device pool did since start, in rows; each counts once a cache step."""

    selected: int  # distinct rows that attention asked for
    recalled: int  # of those, fetched from host because they were absent
    evicted: int
    prefetched: int  # moved before the selection was known
    useful: int  # of those, selected in the same step
    resident: int  # now


class KVCache(Protocol):
    """Rows of every layer, addressed by host slot.

    A cache step lasts from one `begin_step` to the next. In one layer, the rows appended with
    `keep` and the rows asked for in one step must fit the device pool together. Nothing in
    `begin_step`, `append`, `make_resident` and `rows` waits for the device or depends in shape on
    what tensors hold.
    """

    @property
    def capacity(self) -> int:
        """Device slots a layer."""
        ...

    @property
    def host_slots(self) -> int:
        """N_H: every host slot is below it."""
        ...

    @property
    def recalls(self) -> bool:
        """Whether `make_resident` may have rows to copy."""
        ...

    @property
    def metadata_bytes(self) -> int:
        """Bytes of mappings and priorities, all layers: the plan's line "metadata"."""
        ...

    def begin_step(self, *, most_rows: int | None = None, prefetches: bool = False) -> None:
        """Start a cache step: what the previous one protected may be evicted.

        Args:
            most_rows: most distinct rows that it will select, write and prefetch in one layer,
                where the caller knows; None: as many as fit.
            prefetches: whether rows may be fetched in it before they are selected.
        """
        ...

    def end_step(self) -> None:
        """Let the current stream wait for all that runs beside it; a captured step must."""
        ...

    def append(
        self,
        layer: int,
        host_slots: HostSlots,
        rows: Tensor,
        *,
        keep: int,
        beside: bool = False,
        until_selected: bool = False,
    ) -> None:
        """Write new rows to host, and keep the last of them resident in this step.

        Args:
            layer: decoder layer.
            host_slots: [T] int32, distinct; -1 for rows to skip.
            rows: [T, row_bytes] uint8.
            keep: the rows at index >= T - keep become resident; the others only where they are
                already.
            beside: may run beside what the current stream does next; every other call waits.
            until_selected: may also be put off until the layer's next selection is made resident.

        Raises:
            CapacityError: keep exceeds the device pool.
        """
        ...

    def make_resident(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        max_distinct: int | None = None,
    ) -> DeviceSlots:
        """Fetch what is missing of a selection and say where all of it is.

        Args:
            layer: decoder layer.
            host_slots: [T, k] int32, -1 for none; duplicates allowed.
            scores: [T, k] float32 index scores, which decide how long rows stay afterwards.
            max_distinct: most distinct rows among them, where the caller knows; None: T x k.

        Returns:
            [T, k] int32, -1 exactly where host_slots is -1; valid until the next step.

        Raises:
            CapacityError: max_distinct exceeds the device pool.
        """
        ...

    def recall_ahead(
        self,
        layer: int,
        host_slots: HostSlots,
        scores: Tensor,
        *,
        max_distinct: int | None = None,
    ) -> DeviceSlots:
        """`make_resident` beside what the current stream does next.

        A later `make_resident` of the same rows finds them, if in this step or, while they are
        all that was asked for since, in the next. Every other call waits for this one.

        Args:
            layer: decoder layer.
            host_slots: [T, k] int32, -1 for none; duplicates allowed.
            scores: [T, k] float32 index scores.
            max_distinct: most distinct rows among them, where the caller knows; None: T x k.

        Returns:
            [T, k] int32 as `make_resident`; to be read after `wait`, or any other call.

        Raises:
            CapacityError: max_distinct exceeds the device pool.
        """
        ...

    def wait(self) -> None:
        """Let the current stream wait for `recall_ahead`."""
        ...

    def settle(self, layer: int) -> None:
        """Say that all that a layer selects in this step is resident.

        After the last layer, a cache counts and learns beside what the current stream does next;
        `end_step` waits for that.

        Args:
            layer: decoder layer.
        """
        ...

    def stage(
        self, layer: int, host_slots: HostSlots, *, most_rows: int
    ) -> tuple[Tensor, DeviceSlots]:
        """Copies of a selection's rows, where the device pool has no room for all of them.

        The pool stays as it is.

        Args:
            layer: decoder layer.
            host_slots: [T, k] int32, -1 for none; duplicates allowed.
            most_rows: most distinct rows among them.

        Returns:
            [most_rows, row_bytes] uint8, and [T, k] int32 places in it, -1 exactly where host_slots
            is -1.
        """
        ...

    def rows(self, layer: int) -> Tensor:
        """[N_G, row_bytes] uint8: the rows that device slots name."""
        ...

    def release(self, host_slots: Tensor) -> None:
        """Forget host slots in every layer, before they are handed out again.

        Args:
            host_slots: [M] int32 on any device.
        """
        ...

    def counters(self) -> list[LayerCounters]:
        """Figures of every layer; synchronises."""
        ...

    def live_rows(self, live_host_slots: Tensor) -> int:
        """Resident rows whose host slot is in use, in the layer that has most; synchronises.

        Args:
            live_host_slots: [N_H] bool on any device.
        """
        ...

    def check(self, live_host_slots: Tensor | None = None) -> None:
        """Verify the cache invariants; synchronises and reads every resident row.

        Args:
            live_host_slots: [N_H] bool, host slots that are handed out; with it, a resident row
                outside of them is an error too.

        Raises:
            CacheInvariantError: one doesn't hold; the message carries the numbers.
        """
        ...
