"""Fills a model from a Hugging Face checkpoint directory.

Everything that can be wrong is found in the headers first, so that a broken checkpoint fails at
once and not after minutes of reading. Then one tensor at a time is copied into its place.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from echokv.errors import CheckpointError
from echokv.log import get_logger, progress
from echokv.models.block_fp8 import dequantise_into, scale_shape
from echokv.models.checkpoint import TensorInfo, open_shard, read_headers
from echokv.models.deepseek_v32 import DeepseekV32
from echokv.models.layers import Stacked

logger = get_logger(__name__)

PLAIN_DTYPES = ("F32", "BF16", "F16")
FP8_DTYPE = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def load_weights(model: DeepseekV32, path: str | Path) -> None:
    """Copy every weight of a checkpoint into the model.

    bf16, fp16, fp32 and block-fp8 tensors are converted to each parameter's dtype; fp8 weights
    whose place is fp8 too are kept. Layers past num_hidden_layers (multi-token prediction) are
    left alone; other tensors that the model has no place for are named in one warning.

    Args:
        model: on its device, uninitialised.
        path: the checkpoint directory.

    Raises:
        CheckpointError: a missing or damaged file; a tensor missing, of the wrong shape or of an
            unsupported dtype; a scale without its weight or the reverse; a bias that the model
            does not have. Names file and tensor.
    """
    found = _without_extra_layers(read_headers(Path(path)), model.config.num_hidden_layers)
    places = checkpoint_places(model)
    _check(found, places, model.config.quant_block_size, Path(path))
    by_file: dict[Path, list[str]] = {}
    for name in places:
        by_file.setdefault(found[name].file, []).append(name)
    for file in progress(sorted(by_file), total=len(by_file), what="weights", unit="shard"):
        with open_shard(file) as shard:
            for name in by_file[file]:
                values = shard.get_tensor(name)
                if found[name].dtype == FP8_DTYPE and places[name].dtype != torch.float8_e4m3fn:
                    scales = _read(found[name + SCALE_SUFFIX], name + SCALE_SUFFIX)
                    assert model.config.quant_block_size is not None, "checked with the headers"
                    dequantise_into(places[name], values, scales, model.config.quant_block_size)
                else:
                    places[name].copy_(values)


def checkpoint_places(model: DeepseekV32) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes: its name and a view of the checkpoint's shape.

    Stacked experts appear as one matrix an expert, the per-head kv_b_proj as one matrix.
    """
    places: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Stacked):
            mine = module.places()
        else:
            mine = dict(module.named_parameters(recurse=False))
        if path == "lm_head" and module.weight is model.embed_tokens.weight:
            continue  # tied: stored once
        prefix = "lm_head." if path == "lm_head" else f"model.{path}."
        places |= {prefix + name: place for name, place in mine.items()}
    return places


def fp8_weights(path: str | Path) -> frozenset[str]:
    """Names of the weights that a checkpoint stores in fp8, from its headers.

    Raises:
        CheckpointError: as `read_headers`.
    """
    headers = read_headers(Path(path))
    return frozenset(name for name, info in headers.items() if info.dtype == FP8_DTYPE)


def _read(info: TensorInfo, name: str) -> Tensor:
    with open_shard(info.file) as shard:
        tensor: Tensor = shard.get_tensor(name)
        return tensor


def _without_extra_layers(found: dict[str, TensorInfo], layers: int) -> dict[str, TensorInfo]:
    def is_extra(name: str) -> bool:
        match = _LAYER.match(name)
        return match is not None and int(match[1]) >= layers

    return {name: info for name, info in found.items() if not is_extra(name)}


def _check(
    found: dict[str, TensorInfo],
    places: dict[str, Tensor],
    block: tuple[int, int] | None,
    path: Path,
) -> None:
    for name, place in places.items():
        stored = found.get(name)
        if place.dtype == torch.float8_e4m3fn and stored is not None and stored.dtype != FP8_DTYPE:
            raise CheckpointError(
                f"{stored.file}: {name} has dtype {stored.dtype}, the other experts {FP8_DTYPE};"
                " echokv keeps a layer's experts in one dtype: use --gemm-kernel torch"
            )
    missing = [name for name in places if name not in found]
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} tensors: {_some(missing)}")
    for name, place in places.items():
        info = found[name]
        if info.shape != tuple(place.shape):
            raise CheckpointError(
                f"{info.file}: {name} has shape {list(info.shape)},"
                f" config.json asks for {list(place.shape)}"
            )
        _check_dtype(name, found, block)
    _check_rest({name: info for name, info in found.items() if name not in places}, found)


def _check_dtype(name: str, found: dict[str, TensorInfo], block: tuple[int, int] | None) -> None:
    info, scale = found[name], found.get(name + SCALE_SUFFIX)
    if info.dtype in PLAIN_DTYPES:
        if scale is not None:
            raise CheckpointError(
                f"{scale.file}: {name + SCALE_SUFFIX} scales {name}, which is {info.dtype},"
                f" not {FP8_DTYPE}"
            )
        return
    if info.dtype != FP8_DTYPE:
        raise CheckpointError(
            f"{info.file}: {name} has dtype {info.dtype}; echokv loads"
            f" {', '.join(PLAIN_DTYPES)} and block-scaled {FP8_DTYPE}"
        )
    if block is None:
        raise CheckpointError(
            f"{info.file}: {name} is {FP8_DTYPE} but config.json has no quantization_config"
        )
    if scale is None:
        raise CheckpointError(f"{info.file}: {name} is {FP8_DTYPE} but has no {SCALE_SUFFIX[1:]}")
    if len(info.shape) != 2 or scale.shape != scale_shape(info.shape, block):
        raise CheckpointError(
            f"{scale.file}: {name + SCALE_SUFFIX} has shape {list(scale.shape)}; {name} of"
            f" {list(info.shape)} in blocks of {list(block)} does not match it"
        )
    if scale.dtype not in PLAIN_DTYPES:
        raise CheckpointError(f"{scale.file}: {name + SCALE_SUFFIX} has dtype {scale.dtype}")


def _check_rest(rest: dict[str, TensorInfo], found: dict[str, TensorInfo]) -> None:
    """Tensors without a place: scales belong to a weight, a bias is an error, others a warning."""
    unused = []
    for name, info in rest.items():
        if name.endswith(SCALE_SUFFIX):
            if name.removesuffix(SCALE_SUFFIX) not in found:
                raise CheckpointError(
                    f"{info.file}: {name} has no weight {name.removesuffix(SCALE_SUFFIX)}"
                )
        elif name.endswith(".bias") and name.removesuffix("bias") + "weight" in found:
            raise CheckpointError(
                f"{info.file}: {name} would be left out of the result: echokv has no bias there"
            )
        else:
            unused.append(name)
    if unused:
        logger.warning("%d tensors of the checkpoint are not used: %s", len(unused), _some(unused))


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more
