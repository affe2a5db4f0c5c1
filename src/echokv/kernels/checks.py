"""What every kernel wrapper checks before it computes, so that device code needn't."""

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    *,
    device: torch.device | None = None,
) -> None:
    """Raise unless a tensor has the shape, dtype and device asked for and is contiguous.

    Args:
        name: the argument's name, for the message.
        tensor: what was passed.
        shape: wanted sizes; None matches any size.
        dtypes: the dtype or dtypes allowed.
        device: where it must live; None: anywhere.

    Raises:
        ValueError: with the name, what was wanted and what came.
    """
    if tensor.dim() != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {tensor.stride()} for {list(tensor.shape)}"
        )


def check_rows(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    *,
    device: torch.device | None = None,
) -> None:
    """`check_tensor`, but for a view of rows: each contiguous in itself, at any distance."""
    if tensor.dim() == len(shape) and shape[0] in (None, tensor.shape[0]):
        check_tensor(name, tensor[:1], (None, *shape[1:]), dtypes, device=device)
    else:
        check_tensor(name, tensor, shape, dtypes, device=device)


FLOATS = (torch.float32, torch.bfloat16)
"""The dtypes that activations may come in."""
