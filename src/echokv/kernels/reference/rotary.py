"""Rotary embedding of queries, in both pairings of dimensions; computed in float32."""

import torch
from torch import Tensor

from echokv.kernels.checks import FLOATS, check_tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool) -> None:
    """Rotate the first dimensions of every head, and write all of them where they are wanted.

    Args:
        x: [T, H, D] float; a view whose last dimension is contiguous.
        cos: [T, rope / 2] float32, rope <= D.
        sin: likewise.
        out: like x; may be x itself.
        interleaved: pairs (x0, x1), (x2, x3), ...; else (x0, x[rope / 2]), ...
    """
    check_rotate_args(x, cos, sin, out)
    rope = 2 * cos.shape[1]
    out[..., :rope].copy_(rotated(x[..., :rope], cos, sin, interleaved=interleaved))
    out[..., rope:].copy_(x[..., rope:])


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotated copy of x [T, ..., rope]; as `rotate` otherwise."""
    cos, sin = _broadcast(cos, x), _broadcast(sin, x)
    if interleaved:
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return pairs.flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _broadcast(table: Tensor, x: Tensor) -> Tensor:
    """[T, rope / 2] with as many middle dimensions of 1 as x has."""
    return table.view(table.shape[0], *[1] * (x.dim() - 2), table.shape[1])


def check_rotate_args(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Raise ValueError unless `rotate` can take these."""
    check_angles(cos, sin, x.shape[0], x.device)
    if x.dim() != 3 or x.shape[2] < 2 * cos.shape[1]:
        raise ValueError(f"x must be [T, H, {2 * cos.shape[1]} or more], got {list(x.shape)}")
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"out must be like x, {x.dtype} {list(x.shape)}, got {out.dtype} {list(out.shape)}"
        )
    if x.dtype not in FLOATS:
        raise ValueError(f"x must be {' or '.join(map(str, FLOATS))}, got {x.dtype}")
    if x.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the last dimension of x and out must be contiguous")


def check_angles(cos: Tensor, sin: Tensor, tokens: int, device: torch.device) -> None:
    """Raise ValueError unless these are the angles of so many tokens."""
    check_tensor("cos", cos, (tokens, None), torch.float32, device=device)
    check_tensor("sin", sin, tuple(cos.shape), torch.float32, device=device)
