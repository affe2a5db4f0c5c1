"""A step that was launched: who waits for a token of it, and how the tokens reach the CPU.

On a GPU they are copied to pinned memory behind the step and read when an event has passed, so
that reading one step never waits for the next. On a CPU they are there at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from echokv.engine.request import Request
from echokv.engine.sampler import Draws, Sampled, finish


class Readback:
    """Copies of device tensors on their way to the CPU.

    Args:
        tensors: enqueued on the current stream; they may change once that stream goes on.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [self._copy(tensor) for tensor in tensors]
        self._arrived = None
        if any(tensor.is_cuda for tensor in tensors):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[list[float]]:
        """The values of each tensor; waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [copy.tolist() for copy in self._copies]

    @staticmethod
    def _copy(tensor: Tensor) -> Tensor:
        # torch's allocator of pinned memory hands a block out again only after copies into it.
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)


class StepInFlight:
    """What a launched step will have sampled.

    Args:
        requests: those that get a token, in order.
        rows: the row of `draws.token_ids` of each.
        draws: the sampler's result; reports have the rows of `requests`.
    """

    def __init__(self, requests: list[Request], rows: list[int], draws: Draws) -> None:
        self.requests = requests
        self._rows = rows
        self._reported = [row for row, _, _ in draws.reports]
        reports = [tensor for _, values, tokens in draws.reports for tensor in (values, tokens)]
        self._readback = Readback([draws.token_ids, *reports])

    def read(self) -> list[Sampled]:
        """One token for each of `requests`; waits until the step is done."""
        token_ids, *reports = self._readback.read()
        return finish(
            [int(token_ids[row]) for row in self._rows],
            [
                (row, values, [int(token) for token in tokens])
                for row, values, tokens in zip(
                    self._reported, reports[::2], reports[1::2], strict=True
                )
            ],
        )
