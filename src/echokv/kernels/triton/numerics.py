"""Rounding and products that mean the same on a GPU and under Triton's interpreter.

The interpreter of Triton 3.6 truncates fp32 -> bf16, drops the carry and the subnormals of
fp32 -> e4m3, and multiplies bf16 operands as raw integers. Where that matters kernels call these
instead; on a GPU each is the plain instruction.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def to_bfloat16(x):
    """fp32 -> bf16, to nearest even; NaN stays NaN."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def to_float8e4m3(x):
    """fp32 -> e4m3, to nearest even; |x| <= 448."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Adding 2 ** 14 leaves the multiple of 2 ** -9, the subnormals' step, in the lowest bits.
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.uint32, bitcast=True) & 0xF
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 0x3C800000 is 2 ** -6
        return (code | ((bits >> 31) << 7)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 -> dtype, which is fp32 or bf16."""
    if dtype == tl.bfloat16:
        return to_bfloat16(x)
    return x.to(dtype)


@triton.jit
def dot(a, b):
    """a @ b with fp32 sums: a, b both e4m3, both bf16 or both fp32 (never rounded to tf32)."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    if a.dtype == tl.float8e4nv:
        # Hopper adds fp8 products with few bits: move each instruction's sum to fp32.
        return tl.dot(a, b, max_num_imprecise_acc=32)
    return tl.dot(a, b, input_precision="ieee")
