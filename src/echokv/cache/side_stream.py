"""Work beside the main stream: forked where its inputs are ready, joined where it is needed.

Knows streams only. On the CPU everything runs where it stands.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One second stream of a device, and whether it has work that the main one hasn't waited for.

    All calls may be captured into a graph; what is forked must be joined before the capture ends.

    Args:
        device: where the work runs.
        urgent: its blocks are few, and a product's would keep them waiting: a high priority.
    """

    def __init__(self, device: torch.device, *, urgent: bool = True) -> None:
        cuda = device.type == "cuda"
        priority = -1 if urgent else 0
        self._stream = torch.cuda.Stream(device, priority=priority) if cuda else None
        self._kept: list[object] = []
        self._later: list[Callable[[], None]] = []
        self._busy = False

    @contextmanager
    def fork(
        self, *keep: object, catches_up: bool = True, after: "SideStream | None" = None
    ) -> Iterator[None]:
        """Run the block on the side stream, after all that the current one has been given so far.

        Args:
            keep: tensors made on the current stream that the block reads: held until `join`, so
                that their memory isn't given to others meanwhile.
            catches_up: whether what was put off by `later` comes first.
            after: another one, whose work so far comes first too.
        """
        if self._stream is None:
            if catches_up:
                self.catch_up()
            yield
            return
        self._kept += keep
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if after is not None and after._busy:
            assert after._stream is not None
            self._stream.wait_stream(after._stream)
        self._busy = True
        with torch.cuda.stream(self._stream):
            if catches_up:
                self.catch_up()
            yield

    def later(self, work: Callable[[], None]) -> None:
        """Put work off until the next fork: nobody waits for it in this step."""
        self._later.append(work)

    def fork_put_off(self) -> None:
        """Do now, on the side stream, what was put off, if anything was."""
        if self._later:
            with self.fork():
                pass

    def catch_up(self) -> None:
        """Do now, on the current stream, what was put off."""
        work, self._later = self._later, []
        for one in work:
            one()
        self._kept += work  # and what they read

    def join(self) -> None:
        """Make the current stream wait for the side stream, if anything was forked since."""
        if self._busy:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._busy = False
        self._kept.clear()
