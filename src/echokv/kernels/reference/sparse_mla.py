"""Multi-head latent attention over the selected rows only (absorbed form: keys are the rows)."""

import torch
from torch import Tensor

from echokv.kernels.checks import FLOATS, check_tensor
from echokv.kernels.reference.rows import decode_rows
from echokv.memory.formats import RowFormat


def sparse_mla(
    query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat, scale: float
) -> Tensor:
    """softmax(query . row * scale) over a token's rows, times the rows' latent part.

    Softmax and sums are fp32. Only rows that are named are read. Each token is computed by itself,
    so its result is the same bit for bit in any batch.

    Args:
        query: [T, H, latent_dim + rope_dim] float.
        rows: [N, row_bytes] uint8, one layer's device pool.
        device_slots: [T, k] int32, -1 for none, all -1 at the end of a row.
        fmt: the rows' format.
        scale: softmax scale, positive.

    Returns:
        [T, H, latent_dim] in query's dtype; zeros for a token without rows.
    """
    check_mla_args(query, rows, device_slots, fmt)
    num_tokens, heads, _ = query.shape
    out = query.new_zeros(num_tokens, heads, fmt.latent_dim)
    slots, query32 = device_slots.long(), query.float()
    for token, count in enumerate((slots >= 0).sum(dim=1).tolist()):
        if count == 0:
            continue
        keys = decode_rows(rows[slots[token, :count]], fmt, torch.float32)  # [n, latent + rope]
        # A copy: the alignment of a slice could decide which code path the product takes.
        logits = torch.mm(query32[token].clone(), keys.T) * scale  # [H, n]
        out[token] = torch.mm(torch.softmax(logits, dim=1), keys[:, : fmt.latent_dim])
    return out


def check_mla_args(query: Tensor, rows: Tensor, device_slots: Tensor, fmt: RowFormat) -> None:
    """Raise ValueError unless `sparse_mla` can take these."""
    check_tensor("query", query, (None, None, fmt.latent_dim + fmt.rope_dim), FLOATS)
    check_tensor("rows", rows, (None, fmt.row_bytes), torch.uint8, device=query.device)
    shape = (query.shape[0], None)
    check_tensor("device_slots", device_slots, shape, torch.int32, device=query.device)
