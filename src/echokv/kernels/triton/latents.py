"""Norms and rotations of a layer's latents; contracts in `kernels/reference/latents.py`."""

import triton
import triton.language as tl
from torch import Tensor

from echokv.kernels.reference.latents import check_index_key_args, check_latent_args
from echokv.kernels.triton.numerics import round_to
from echokv.kernels.triton.rotary import rotate_pairs


def mla_latents(
    q_a: Tensor,
    kv_a: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q_a [T, q_rank] and kv_a [T, latent + rope] to q_latent, latent and k_rope."""
    check_latent_args(q_a, kv_a, q_weight, kv_weight, cos, sin)
    tokens, half = cos.shape
    q_rank, latent_dim = q_weight.shape[0], kv_weight.shape[0]
    q_latent = q_a.new_empty(tokens, q_rank)
    latent = kv_a.new_empty(tokens, latent_dim)
    k_rope = kv_a.new_empty(tokens, 2 * half)
    if tokens:
        block = triton.next_power_of_2(max(q_rank, latent_dim))
        _mla_latents[(tokens, 2)](
            q_a, kv_a, q_weight, kv_weight, cos, sin, q_latent, latent, k_rope,
            q_rank, latent_dim, half, q_a.stride(0), kv_a.stride(0), eps, block,
            triton.next_power_of_2(half),
        )  # fmt: skip
    return q_latent, latent, k_rope


def index_key_rows(
    keys: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """LayerNorm of keys [T, D], their first dimensions rotated."""
    check_index_key_args(keys, weight, bias, cos, sin)
    tokens, half = cos.shape
    out = keys.new_empty(keys.shape)
    if tokens:
        _index_key_rows[(tokens,)](
            keys, weight, bias, cos, sin, out, keys.shape[1], half, keys.stride(0), eps,
            triton.next_power_of_2(keys.shape[1]), interleaved, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _norm_row(x, weight, out, size, eps, BLOCK: tl.constexpr):
    """RMSNorm of `size` values at x."""
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0)  # on its way while the sum is made
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    tl.store(out + column, round_to(value * scale * w, out.dtype.element_ty), mask=inside)


@triton.jit
def _mla_latents(
    q_a,  # [T, q_rank], rows q_stride apart
    kv_a,  # [T, latent_dim + 2 * half], rows kv_stride apart
    q_weight,  # [q_rank]
    kv_weight,  # [latent_dim]
    cos,  # [T, half]
    sin,  # [T, half]
    q_latent,  # [T, q_rank] out
    latent,  # [T, latent_dim] out
    k_rope,  # [T, 2 * half] out
    q_rank,
    latent_dim,
    half,
    q_stride,
    kv_stride,
    eps,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Program (token, part): the query's latent, or the row."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _norm_row(q_a + token * q_stride, q_weight, q_latent + token * q_rank, q_rank, eps, BLOCK)
    else:
        row = kv_a + token * kv_stride
        _norm_row(row, kv_weight, latent + token * latent_dim, latent_dim, eps, BLOCK)
        pair = tl.arange(0, PAIRS)
        inside = pair < half
        c = tl.load(cos + token * half + pair, mask=inside, other=0.0)
        s = tl.load(sin + token * half + pair, mask=inside, other=0.0)
        target = k_rope + token * 2 * half
        rotate_pairs(row + latent_dim, target, c, s, pair, inside, half, True)


@triton.jit
def _index_key_rows(
    keys,  # [T, size], rows stride apart
    weight,  # [size]
    bias,  # [size]
    cos,  # [T, half]
    sin,  # [T, half]
    out,  # [T, size] out
    size,
    half,
    stride,
    eps,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Program (token). A column and its partner are normed twice, which costs less than a shuffle.

    Both are rounded before they are rotated, as LayerNorm's result is.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    row = keys + token * stride
    value = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / size
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    if INTERLEAVED:
        partner = column ^ 1
        pair = column // 2
        is_first = column % 2 == 0
    else:
        partner = tl.where(column < half, column + half, column - half)
        pair = tl.where(column < half, column, column - half)
        is_first = column < half
    turned = column < 2 * half
    partner = tl.where(turned, partner, column)
    own = _scaled(value, mean, scale, weight, bias, column, inside, out.dtype.element_ty)
    other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    other = _scaled(other, mean, scale, weight, bias, partner, inside, out.dtype.element_ty)
    c = tl.load(cos + token * half + pair, mask=turned, other=1.0)
    s = tl.load(sin + token * half + pair, mask=turned, other=0.0)
    result = own * c + tl.where(is_first, -other, other) * s
    tl.store(out + token * size + column, round_to(result, out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(value, mean, scale, weight, bias, column, inside, DTYPE: tl.constexpr):
    """A normed value as DTYPE holds it, in fp32."""
    w = tl.load(weight + column, mask=inside, other=0.0)
    b = tl.load(bias + column, mask=inside, other=0.0)
    return round_to((value - mean) * scale * w + b, DTYPE).to(tl.float32)


_ANGLES = {"cos": "*fp32", "sin": "*fp32"}
COMPILE_SIGNATURES = (
    (
        _mla_latents,
        {"q_a": "*bf16", "kv_a": "*bf16", "q_weight": "*fp32", "kv_weight": "*fp32", **_ANGLES,
         "q_latent": "*bf16", "latent": "*bf16", "k_rope": "*bf16", "q_rank": "i32:16",
         "latent_dim": "i32:16", "half": "i32:16", "q_stride": "i32:16", "kv_stride": "i32:16",
         "eps": "fp32", "BLOCK": 2048, "PAIRS": 32},
    ),
    *(
        (
            _index_key_rows,
            {"keys": "*bf16", "weight": "*fp32", "bias": "*fp32", **_ANGLES, "out": "*bf16",
             "size": "i32:16", "half": "i32:16", "stride": "i32:16", "eps": "fp32", "BLOCK": 128,
             "INTERLEAVED": interleaved},
            {"num_warps": 1},
        )
        for interleaved in (False, True)
    ),
)  # fmt: skip
