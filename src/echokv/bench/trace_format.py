"""A recorded run as the KV cache saw it: which rows each pass wrote, selected and forgot.

Knows the file and the arrays, neither engine nor cache. Format 1 of the file, a compressed npz
("selected rows" are those whose selection was recorded, in the order of `row_sequence`):

| entry | shape, dtype | meaning |
|---|---|---|
| `meta` | text | JSON: format, version, topk, layers, kth_ranks, and what was run |
| `sequence_prompt_lens` | [Q] int32 | tokens of each sequence when it was admitted |
| `sequence_offsets`, `sequence_blocks` | [Q + 1], [B] int32 | block tables, end to end |
| `pass_offsets` | [P + 1] int32 | rows of each forward pass |
| `row_sequence`, `row_position` | [R] int32 | each row's sequence and position |
| `row_selected` | [R] bool | whether the row's selection was recorded |
| `release_pass`, `release_block` | [E] int32 | host block forgotten before that pass |
| `change_counts` | [L, S] int32 | positions that entered or left, against the same sequence's \
previous selected row |
| `change_gaps` | [C] uint | those positions, ascending, as differences |
| `score_codes` | [L, N] uint8 | place of each score within its row: see `score_codes` |
| `kth_scores` | [L, S] float32 | lowest selected score; -inf below k tokens |
| `rank_scores` | [L, S, G] float32 | score at each of meta's kth_ranks; -inf beyond the context, \
NaN where it wasn't recorded |

A sequence is a request from one admission to its end or preemption.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echokv.errors import ConfigError
from echokv.memory.slots import BLOCK_TOKENS, blocks_for

FORMAT, VERSION = "echokv-trace", 1

CODE_BINS = 252
"""Bins between a row's lowest and highest score: seven priority levels times 36."""

_LOWEST, _HIGHEST = 0, CODE_BINS + 1

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A whole trace in memory: L layers that select, S selected rows, k entries each."""

    meta: dict[str, Any]
    sequence_prompt_lens: Ints  # [Q]
    sequence_offsets: Ints  # [Q + 1]
    sequence_blocks: Ints  # [B]
    pass_offsets: Ints  # [P + 1]
    row_sequence: Ints  # [R]
    row_position: Ints  # [R]
    row_selected: NDArray[np.bool_]  # [R]
    release_pass: Ints  # [E], ascending
    release_block: Ints  # [E]
    positions: Ints  # [L, S, k], ascending, -1 padded
    score_codes: Codes  # [L, S, k], 0 where positions is -1
    kth_scores: Floats  # [L, S]
    rank_scores: Floats  # [L, S, G]

    @property
    def topk(self) -> int:
        """Entries of a selection."""
        return int(self.meta["topk"])

    @property
    def layers(self) -> list[int]:
        """The decoder layers that select; layers that share a selection would repeat these."""
        return list(self.meta["layers"])

    @property
    def num_passes(self) -> int:
        """P."""
        return len(self.pass_offsets) - 1

    @property
    def host_slots(self) -> int:
        """Host slots that cover every block of the trace."""
        return (int(self.sequence_blocks.max()) + 1) * BLOCK_TOKENS

    def slots(self, sequences: Ints, positions: Ints) -> Ints:
        """Host slots of positions, -1 where a position is -1; the shapes broadcast."""
        safe = np.maximum(positions, 0)
        blocks = self.sequence_blocks[self.sequence_offsets[sequences] + safe // BLOCK_TOKENS]
        slots = blocks * BLOCK_TOKENS + safe % BLOCK_TOKENS
        return np.where(positions < 0, -1, slots).astype(np.int32, order="C")

    def decodes(self) -> NDArray[np.bool_]:
        """[P]: passes whose rows all decode, one token a sequence."""
        is_decode = self.row_position >= self.sequence_prompt_lens[self.row_sequence]
        return np.logical_and.reduceat(is_decode, self.pass_offsets[:-1])

    def live_tokens(self) -> int:
        """Most tokens that the rows of one decoding pass can look back on, shared ones once."""
        most = 0
        for number in np.flatnonzero(self.decodes()):
            rows = slice(self.pass_offsets[number], self.pass_offsets[number + 1])
            live: dict[int, int] = {}  # host block -> tokens in use
            for sequence, position in zip(
                self.row_sequence[rows], self.row_position[rows], strict=True
            ):
                start = self.sequence_offsets[sequence]
                tokens = int(position) + 1
                blocks = self.sequence_blocks[start : start + blocks_for(tokens)]
                live.update(dict.fromkeys(blocks[:-1].tolist(), BLOCK_TOKENS))
                last = int(blocks[-1])
                live[last] = max(live.get(last, 0), (tokens - 1) % BLOCK_TOKENS + 1)
            most = max(most, sum(live.values()))
        return most


def score_codes(scores: Floats, chosen: NDArray[np.bool_], levels: Ints) -> Codes:
    """Scores as their place within the row, in a byte, keeping the product's priority levels.

    Args:
        scores: [S, k].
        chosen: [S, k], entries that count.
        levels: [S, k] in [1, 7]: what `score_priorities` makes of the scores.

    Returns:
        [S, k]: 0 for a row's lowest score (and entries that don't count), CODE_BINS + 1 for its
        highest, else 1 + the bin. `code_scores` gives scores back that get the same levels.
    """
    low = np.where(chosen, scores, np.inf).min(axis=1, keepdims=True)
    high = np.where(chosen, scores, -np.inf).max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        place = np.nan_to_num((scores - low) / (high - low), nan=0.0, posinf=0.0, neginf=0.0)
    width = CODE_BINS // 7
    first = (levels - 1) * width
    bins = np.clip((place * CODE_BINS).astype(np.int32), first, first + width - 1)
    codes = np.where(place >= 1, _HIGHEST, np.where(place <= 0, _LOWEST, 1 + bins))
    return np.where(chosen, codes, 0).astype(np.uint8)


def code_scores(codes: Codes) -> Floats:
    """Stand-ins for scores, float32: the middle of each bin, in units of a bin."""
    middles = codes.astype(np.float32) - 0.5
    return np.where(codes == _LOWEST, 0, np.where(codes == _HIGHEST, CODE_BINS, middles)).astype(
        np.float32
    )


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace.

    Raises:
        ConfigError: the file can't be written.
    """
    counts, gaps = _encode_positions(trace)
    meta = {"format": FORMAT, "version": VERSION} | trace.meta
    arrays = {name: getattr(trace, name) for name in _PLAIN}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                allow_pickle=False,
                meta=np.array(json.dumps(meta)),
                change_counts=counts,
                change_gaps=gaps,
                score_codes=trace.score_codes[trace.positions >= 0],
                **arrays,
            )
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def load_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: no such file, not a trace, or a version that this code doesn't read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            entries = {name: file[name] for name in file.files}
        meta = json.loads(str(entries.pop("meta")))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a trace: {error!r}") from error
    if (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
        raise ConfigError(
            f"{path} is {meta.get('format')!r} version {meta.get('version')!r}; this code reads"
            f" {FORMAT!r} version {VERSION}"
        )
    try:
        return _assemble(meta, entries)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from error


_PLAIN = (
    "sequence_prompt_lens sequence_offsets sequence_blocks pass_offsets row_sequence row_position"
    " row_selected release_pass release_block kth_scores rank_scores"
).split()


def _encode_positions(trace: Trace) -> tuple[Ints, NDArray[np.unsignedinteger[Any]]]:
    """change_counts and change_gaps of every layer."""
    owners = trace.row_sequence[trace.row_selected].tolist()
    counts = np.zeros(trace.positions.shape[:2], np.int32)
    gaps = [np.zeros(0, np.int64)]
    for layer, rows in enumerate(trace.positions):
        previous: dict[int, Ints] = {}
        for row, owner in enumerate(owners):
            chosen = rows[row][rows[row] >= 0]
            changed = np.setxor1d(previous.get(owner, _NOTHING), chosen, assume_unique=True)
            previous[owner] = chosen
            counts[layer, row] = changed.size
            gaps.append(np.diff(changed, prepend=0))
    joined = np.concatenate(gaps)
    return counts, joined.astype(np.min_scalar_type(int(joined.max(initial=0))))


_NOTHING = np.zeros(0, np.int32)


def _decode_positions(
    owners: list[int], counts: Ints, gaps: NDArray[np.unsignedinteger[Any]], topk: int
) -> Ints:
    positions = np.full((*counts.shape, topk), -1, np.int32)
    ends = iter(np.cumsum(counts.ravel()).tolist())
    start = 0
    for layer in range(counts.shape[0]):
        previous: dict[int, Ints] = {}
        for row, owner in enumerate(owners):
            end = next(ends)
            changed = np.cumsum(gaps[start:end], dtype=np.int32)
            chosen = np.setxor1d(previous.get(owner, _NOTHING), changed, assume_unique=True)
            positions[layer, row, : chosen.size] = chosen
            previous[owner], start = chosen, end
    return positions


def _assemble(meta: dict[str, Any], entries: dict[str, NDArray[Any]]) -> Trace:
    owners = entries["row_sequence"][entries["row_selected"]].tolist()
    positions = _decode_positions(
        owners, entries["change_counts"], entries["change_gaps"], int(meta["topk"])
    )
    codes = np.zeros(positions.shape, np.uint8)
    codes[positions >= 0] = entries["score_codes"]
    return Trace(
        meta=meta,
        positions=positions,
        score_codes=codes,
        **{name: entries[name] for name in _PLAIN},
    )


def selected_rows_by_pass(trace: Trace) -> Iterator[tuple[slice, slice]]:
    """For each pass: its rows, and its selected rows, as slices."""
    before = np.concatenate([[0], np.cumsum(trace.row_selected)])
    for start, end in zip(trace.pass_offsets[:-1], trace.pass_offsets[1:], strict=True):
        yield slice(int(start), int(end)), slice(int(before[start]), int(before[end]))
