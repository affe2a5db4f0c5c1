"""Replays a recorded trace's decoding steps as the selections of a decode benchmark.

The trace's model is smaller than the benchmark's: its layers are used in turn, and where it
selects fewer tokens each of its positions stands for a run of adjacent ones. What stays is how
much consecutive steps have in common.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from echokv.bench.decode_replay import salt_of
from echokv.bench.trace_format import load_trace
from echokv.errors import ConfigError

_FEWEST_STEPS = 2


class TraceReplay:
    """A `SelectionSource` that walks a trace's sequences to and fro.

    Each request follows one sequence from a place of its own; at either end it turns, so that no
    step jumps.

    Args:
        path: file of `bench trace record`.
        topk: entries of a selection; a multiple of the trace's.
        num_layers: layers of the benchmark's model that have an indexer.
        device: where selections are made.

    Attributes:
        least_context: tokens that every request must have.

    Raises:
        ConfigError: not a trace, another top-k, or no sequence that decodes.
    """

    def __init__(self, path: Path, topk: int, num_layers: int, device: torch.device) -> None:
        trace = load_trace(path)
        if topk % trace.topk:
            raise ConfigError(
                f"{path} selects {trace.topk} tokens, which does not divide the model's {topk}"
            )
        self._width = topk // trace.topk
        owners = trace.row_sequence[trace.row_selected]
        decoding = trace.row_position[trace.row_selected] >= trace.sequence_prompt_lens[owners]
        runs = [
            np.flatnonzero(decoding & (owners == sequence))
            for sequence in range(len(trace.sequence_prompt_lens))
        ]
        runs = [rows for rows in runs if rows.size >= _FEWEST_STEPS]
        if not runs:
            raise ConfigError(f"{path} has no sequence of two or more decoding steps")
        lengths = [rows.size for rows in runs]
        chosen = trace.positions[:, np.concatenate(runs)]  # [L, S, k]
        self.least_context = (int(chosen.max()) + 1) * self._width
        self.steps_to_renew = 1
        self.description = f"trace {path.name}, each position {self._width} tokens wide"
        layers = np.arange(num_layers) % chosen.shape[0]
        self._positions = torch.from_numpy(chosen[layers]).to(device)  # [L_index, S, k]
        self._lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        firsts = np.cumsum([0, *lengths[:-1]])
        self._firsts = torch.tensor(firsts, dtype=torch.int32, device=device)
        self._run = torch.arange(self._width, dtype=torch.int32, device=device)

    def positions(self, steps: Tensor, context_lens: Tensor, requests: Tensor) -> Tensor:
        """See `SelectionSource`."""
        salt = salt_of(requests)
        sequence = (salt % self._lengths.shape[0]).long()
        last = self._lengths[sequence] - 1
        there_and_back = (steps + salt) % (2 * last)
        step = torch.minimum(there_and_back, 2 * last - there_and_back)
        rows = self._positions[:, (self._firsts[sequence] + step).long()]  # [L_index, T, k]
        wide = (rows[..., None] * self._width + self._run).flatten(-2)
        absent = (wide < 0) | (wide >= context_lens[:, None])
        return wide.masked_fill(absent, -1)
