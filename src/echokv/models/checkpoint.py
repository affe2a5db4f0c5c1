"""A Hugging Face checkpoint directory as a table of tensors, checked before anything is read.

Knows files, shards and headers; nothing of models. Tensors are mapped, not loaded: one at a time
costs host memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from echokv.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: BF16, F8_E4M3, ...


def open_shard(file: Path) -> Any:
    """Map one safetensors file; a context manager with `keys`, `get_slice` and `get_tensor`.

    Raises:
        CheckpointError: missing, truncated or damaged.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} ({file.stat().st_size} bytes) is truncated or damaged: {error}"
        ) from error


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """List every tensor of a checkpoint.

    Args:
        directory: holds `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
        CheckpointError: no weights, a bad index, a missing or damaged shard, or a tensor that is
            not in the shard that the index names.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise CheckpointError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return _read_header(directory / SINGLE_FILE)
    weight_map = _read_index(index)
    found: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            names = [name for name, file in weight_map.items() if file == shard]
            raise CheckpointError(
                f"{directory / shard} does not exist; {INDEX_FILE} puts {len(names)} tensors"
                f" there, {names[0]} among them"
            )
        found.update(_read_header(directory / shard))
    for name, shard in weight_map.items():
        if name not in found or found[name].file.name != shard:
            raise CheckpointError(
                f"{directory / shard} lacks {name}, which {INDEX_FILE} puts there"
            )
    return found


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map names no tensor")
    return weight_map


def _read_header(file: Path) -> dict[str, TensorInfo]:
    with open_shard(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        return {
            name: TensorInfo(file, tuple(item.get_shape()), item.get_dtype())
            for name, item in slices.items()
        }
