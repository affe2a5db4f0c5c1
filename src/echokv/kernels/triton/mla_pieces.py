"""The two kernels of sparse latent attention: one piece of a token's rows, and the pieces' sum.

A piece keeps a running maximum, as FlashAttention does, and leaves its sums unnormalised. Where
tensor cores take the product (`sparse_mla.mla_tiles`), a tile of rows is unpacked once, into shared
memory, from which both products read it; in float32 a program gives some columns of the output and
makes the logits for itself, in steps that fit registers.
"""

import triton
import triton.language as tl

from echokv.kernels.triton.numerics import INTERPRETED, dot, round_to


@triton.jit
def _latent_tile(
    values,  # [N, row_values] latent in the rows' dtype (e4m3 for fp8)
    scales,  # [N, row_scales] the same bytes as fp32; read where IS_FP8
    slot,  # [ROWS] int64
    named,  # [ROWS]
    start,  # first column; a multiple of GROUP where IS_FP8
    row_values,
    row_scales,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_FP8: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[ROWS, COLUMNS] of DTYPE; zeros where there is no row or no column."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    at = values + (slot * row_values)[:, None] + column
    there = named[:, None]
    if LATENT % COLUMNS != 0:
        there &= column < LATENT
    raw = tl.load(at, mask=there, other=0.0)
    if raw.dtype == DTYPE:
        return raw  # from where it lands in shared memory, without passing through registers
    wide = raw.to(tl.float32)
    if IS_FP8:
        groups: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
        group = start // GROUP + tl.arange(0, groups)[None, :]
        at = scales + (slot * row_scales)[:, None] + LATENT // 4 + group
        there = named[:, None]
        if LATENT % COLUMNS != 0:
            there &= group < LATENT // GROUP
        factor = tl.load(at, mask=there, other=0.0)
        wide = wide.reshape(raw.shape[0], groups, COLUMNS // groups) * factor[:, :, None]
        wide = wide.reshape(raw.shape[0], COLUMNS)
    return round_to(wide, DTYPE)


@triton.jit
def attend_piece(
    query,  # [T, H, LATENT + ROPE_DIM]
    values,  # as in _latent_tile
    scales,
    ropes,  # [N, row_ropes * UNIT] the same bytes in the rope part's dtype
    device_slots,  # [T, k]
    sums,  # [T, pieces, H, LATENT] out: probabilities times rows
    tops,  # [T, pieces, H] fp32 out: the largest logit, before scaling; -inf without rows
    totals,  # [T, pieces, H] fp32 out: sums of probabilities
    scale_log2,
    heads,
    k,
    row_values,
    row_scales,
    row_ropes,  # in units of UNIT values, as is rope_at
    rope_at,  # where the rope part starts in a row of ropes
    UNIT: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,  # ROPE_DIM or more
    COLUMNS: tl.constexpr,  # of a program's output; LATENT or more: rows are unpacked once
    GROUP: tl.constexpr,
    PIECE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_FP8: tl.constexpr,
    DTYPE: tl.constexpr,  # of the products
):
    """Program (group of columns and block of heads, piece, token)."""
    groups: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    first_column = tl.program_id(0) % groups * COLUMNS
    head = tl.program_id(0) // groups * HEADS + tl.arange(0, HEADS)
    head_ok = head < heads
    piece = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    slots = device_slots + token * k
    slots += piece * PIECE
    left = k - piece * PIECE
    entry = tl.arange(0, PIECE)
    count = tl.sum((tl.load(slots + entry, mask=entry < left, other=-1) >= 0).to(tl.int32))
    query_row = query + token * heads * (LATENT + ROPE_DIM) + (head * (LATENT + ROPE_DIM))[:, None]
    rope_column = tl.arange(0, ROPE)[None, :]
    q_rope_mask = head_ok[:, None] & (rope_column < ROPE_DIM)
    q_rope = tl.load(query_row + LATENT + rope_column, mask=q_rope_mask, other=0.0).to(DTYPE)
    column = tl.arange(0, COLUMNS)[None, :]
    q_mask = head_ok[:, None] & (column < LATENT)
    if groups == 1:
        q = tl.load(query_row + column, mask=q_mask, other=0.0).to(DTYPE)
    acc = tl.zeros((HEADS, COLUMNS), tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for start in range(0, PIECE if INTERPRETED else count, ROWS):  # rows come first, then none
        index = start + tl.arange(0, ROWS)
        slot = tl.load(slots + index, mask=index < left, other=-1).to(tl.int64)
        named = slot >= 0
        rope_row = ((slot * row_ropes + rope_at) * UNIT)[:, None]
        rope_mask = named[:, None] & (rope_column < ROPE_DIM)
        rope = tl.load(ropes + rope_row + rope_column, mask=rope_mask, other=0.0)
        if rope.dtype != DTYPE:
            rope = round_to(rope.to(tl.float32), DTYPE)
        if groups == 1:
            row = _latent_tile(
                values, scales, slot, named, 0, row_values, row_scales, LATENT, COLUMNS, GROUP,
                IS_FP8, DTYPE,
            )  # fmt: skip
            logits = dot(q, tl.trans(row)) + dot(q_rope, tl.trans(rope))
        else:
            logits = dot(q_rope, tl.trans(rope))
            for step in range(0, LATENT, COLUMNS):
                mask = head_ok[:, None] & (step + column < LATENT)
                q = tl.load(query_row + step + column, mask=mask, other=0.0).to(DTYPE)
                row = _latent_tile(
                    values, scales, slot, named, step, row_values, row_scales, LATENT, COLUMNS,
                    GROUP, IS_FP8, DTYPE,
                )  # fmt: skip
                logits += dot(q, tl.trans(row))
            row = _latent_tile(
                values, scales, slot, named, first_column, row_values, row_scales, LATENT, COLUMNS,
                GROUP, IS_FP8, DTYPE,
            )  # fmt: skip
        logits = tl.where(named[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        # Scaled after the subtraction, which leaves small numbers: a smaller rounding error.
        probs = tl.exp2((logits - base[:, None]) * scale_log2)
        fade = tl.exp2((top - base) * scale_log2)
        total = total * fade + tl.sum(probs, axis=1)
        acc = acc * fade[:, None] + dot(round_to(probs, DTYPE), row)
        top = new_top
    first = (token * tl.num_programs(1) + piece) * heads
    own = head_ok & (first_column == 0)
    tl.store(tops + first + head, top, mask=own)
    tl.store(totals + first + head, total, mask=own)
    column += first_column
    at = sums + first * LATENT + head[:, None] * LATENT + column
    tl.store(at, round_to(acc, sums.dtype.element_ty), mask=head_ok[:, None] & (column < LATENT))


@triton.jit
def add_pieces(
    sums,  # [T, PIECES, H, latent_dim]
    tops,  # [T, PIECES, H] fp32
    totals,  # [T, PIECES, H] fp32
    out,  # [T, H, latent_dim]
    scale_log2,
    heads,
    latent_dim,
    PIECES: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
):
    """Program (head, token): the pieces, added in order; zeros where there were no rows."""
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    column = tl.arange(0, BLOCK_LATENT)
    piece = tl.arange(0, BLOCK_PIECES)
    first = token * PIECES * heads + head
    mask = piece < PIECES
    top = tl.load(tops + first + piece * heads, mask=mask, other=float("-inf"))
    base = tl.max(top, axis=0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = tl.load(totals + first + piece * heads, mask=mask, other=0.0)
    total = tl.sum(total * tl.exp2((top - base) * scale_log2), axis=0)
    acc = tl.zeros((BLOCK_LATENT,), tl.float32)
    inside = column < latent_dim
    for i in tl.static_range(PIECES):
        weight = tl.exp2((tl.load(tops + first + i * heads) - base) * scale_log2)
        part = tl.load(sums + (first + i * heads) * latent_dim + column, mask=inside, other=0.0)
        acc += weight * part.to(tl.float32)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    target = out + (token * heads + head) * latent_dim + column
    tl.store(target, round_to(acc, out.dtype.element_ty), mask=inside)
