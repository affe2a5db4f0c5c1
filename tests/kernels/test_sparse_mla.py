"""Attention over selected rows, against dense fp64 attention over what the rows stand for."""

from typing import Any

import pytest
import torch

from echokv.kernels.reference.rows import decode_rows, encode_rows
from echokv.memory.formats import RowFormat

POISON = 0xFF  # NaN as fp32, as bf16 and as e4m3
FORMATS = ["float32", "bfloat16", "fp8_ds_mla"]
SCALE = 0.1352


class Case:
    """A pool of NaN with a few rows in it, and tokens that name some of them."""

    def __init__(
        self,
        backend: Any,
        name: str,
        counts: list[int],
        *,
        k: int,
        heads: int = 4,
        latent_dim: int = 128,
        rope_dim: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.fmt = RowFormat(name=name, latent_dim=latent_dim, rope_dim=rope_dim)
        num_rows, num_slots = max(counts) + 3, 2 * max(counts) + 7
        device = backend.device
        latent, rope = torch.randn(num_rows, latent_dim), torch.randn(num_rows, rope_dim)
        encoded = encode_rows(latent.to(device), rope.to(device), self.fmt)
        where = torch.randperm(num_slots)[:num_rows].to(device)
        self.pool = torch.full(
            (num_slots, self.fmt.row_bytes), POISON, dtype=torch.uint8, device=device
        )
        self.pool[where] = encoded
        self.slots = torch.full((len(counts), k), -1, dtype=torch.int32, device=device)
        for token, count in enumerate(counts):
            picked = where[torch.randperm(num_rows)[:count].to(device)]
            self.slots[token, :count] = picked.to(torch.int32)
        self.query = torch.randn(len(counts), heads, latent_dim + rope_dim).to(dtype).to(device)

    def run(self, backend: Any, tokens: list[int] | None = None) -> torch.Tensor:
        """The op on some tokens (all by default)."""
        picked = slice(None) if tokens is None else tokens
        out: torch.Tensor = backend.op("sparse_mla")(
            self.query[picked].contiguous(),
            self.pool,
            self.slots[picked].contiguous(),
            self.fmt,
            SCALE,
        )
        return out

    def dense(self, token: int, dtype: torch.dtype) -> torch.Tensor:
        """One token's attention in a dtype, in straightforward PyTorch: [H, latent_dim].

        Softmax is in fp32, in fp64 when that is the dtype.
        """
        rows = self.rows(token).to(dtype)
        logits = (self.query[token].cpu().to(dtype) @ rows.T).to(
            torch.promote_types(dtype, torch.float32)
        )
        probs = torch.softmax(logits * SCALE, dim=1).to(dtype)
        return probs @ rows[:, : self.fmt.latent_dim]

    def rows(self, token: int) -> torch.Tensor:
        """What the rows that a token names stand for: [n, latent_dim + rope_dim] float32."""
        slots = self.slots[token]
        return decode_rows(self.pool[slots[slots >= 0].long()], self.fmt, torch.float32).cpu()

    def rounding(self, token: int) -> float:
        """How far one fp32 rounding of the largest logit moves a probability, relatively."""
        logits = self.query[token].cpu().double() @ self.rows(token).double().T * SCALE
        return float(logits.abs().max()) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, latent_dim, rope_dim", [(4, 128, 32), (17, 256, 16)])
def test_attention_equals_the_dense_one(
    backend: Any, name: str, dtype: torch.dtype, heads: int, latent_dim: int, rope_dim: int
) -> None:
    counts = [0, 1, 63, 64, 65, 130] if not backend.interpreted else [0, 1, 31, 33, 50]
    case = Case(
        backend, name, counts, k=max(counts), heads=heads, latent_dim=latent_dim, rope_dim=rope_dim,
        dtype=dtype,
    )  # fmt: skip
    out = case.run(backend)
    assert out.shape == (len(counts), heads, latent_dim) and out.dtype == dtype
    assert (out[0] == 0).all(), "a token without rows"
    for token in range(1, len(counts)):
        exact = case.dense(token, torch.float64)
        plain = case.dense(token, dtype).double()
        rounding = case.rounding(token) + 2 * torch.finfo(dtype).eps
        allowed = 2 * (plain - exact).abs().max() + rounding * exact.abs().max()
        assert (out[token].cpu().double() - exact).abs().max() <= allowed, f"token {token}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("k", [270, 700])
def test_attention_over_several_splits(backend: Any, name: str, k: int) -> None:
    if backend.interpreted and (k == 700 or name == "fp8_ds_mla"):
        pytest.skip("slow under the interpreter, where the other cases cover splits")
    counts = [k, 257, 256, 2]
    case = Case(backend, name, counts, k=k)
    out = case.run(backend)
    for token in range(len(counts)):
        exact = case.dense(token, torch.float64)
        plain = case.dense(token, torch.float32).double()
        rounding = case.rounding(token) + 2 * torch.finfo(torch.float32).eps
        allowed = 2 * (plain - exact).abs().max() + rounding * exact.abs().max()
        assert (out[token].cpu().double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_do_not_depend_on_the_batch(
    backend: Any, name: str, dtype: torch.dtype
) -> None:
    counts = [70, 3, 0, 64, 1, 65, 40]
    case = Case(backend, name, counts, k=70, heads=3, dtype=dtype)
    together = case.run(backend)
    for token in range(0, len(counts), 3 if backend.interpreted else 1):
        assert torch.equal(case.run(backend, [token])[0], together[token])
    assert torch.equal(case.run(backend, [5, 2, 0])[0], together[5])


def test_a_tokens_bits_do_not_depend_on_where_its_rows_are(backend: Any) -> None:
    """Offloaded and resident pools differ in slots only, so nothing else may."""
    case = Case(backend, "bfloat16", [70, 64], k=70)
    before = case.run(backend)
    moved = torch.randperm(case.pool.shape[0]).to(backend.device)
    pool = torch.empty_like(case.pool)
    pool[moved] = case.pool
    case.pool = pool
    case.slots = torch.where(case.slots < 0, -1, moved[case.slots.long()].to(torch.int32))
    assert torch.equal(case.run(backend), before)


def test_a_dominant_row_wins_without_overflow(backend: Any) -> None:
    """Logits in the thousands: softmax must subtract the maximum, in every split."""
    case = Case(backend, "float32", [300], k=300)
    case.query *= 1000
    exact = case.dense(0, torch.float64)
    assert (case.run(backend)[0].cpu().double() - exact).abs().max() < 1e-2


def test_rows_past_4_gib_are_read_from_where_they_are(backend: Any, lazy_bytes: Any) -> None:
    case = Case(backend, "fp8_ds_mla", [3, 2], k=4)
    near = case.run(backend)
    row_bytes = case.fmt.row_bytes
    num_slots = 2**32 // row_bytes + 2
    pool = lazy_bytes(num_slots * row_bytes, backend.device).view(num_slots, -1)
    far = torch.tensor([num_slots - 1, 2**31 // row_bytes + 1, 0, 5], device=backend.device)
    for token in range(2):
        picked = case.slots[token] >= 0
        moved = far[torch.arange(4, device=far.device)[picked] + token]
        pool[moved] = case.pool[case.slots[token][picked].long()]
        lone = Case.__new__(Case)
        lone.__dict__.update(case.__dict__, pool=pool, slots=case.slots.clone())
        lone.slots[token, picked] = moved.to(torch.int32)
        assert torch.equal(lone.run(backend, [token])[0], near[token])


def test_attention_refuses_what_does_not_fit(backend: Any) -> None:
    case = Case(backend, "float32", [3], k=4)
    case.slots = case.slots.long()
    with pytest.raises(ValueError, match=r"device_slots must be torch.int32, got torch.int64"):
        case.run(backend)
