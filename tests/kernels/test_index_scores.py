"""The indexer's scores, against a dense fp64 computation over what the pages stand for."""

from typing import Any

import numpy as np
import pytest
import torch

from echokv.kernels.reference.index_keys import write_index_keys
from echokv.memory.formats import IndexKeyFormat

POISON = 0xFF  # NaN as fp32, as bf16 and as e4m3
FORMATS = ["float32", "bfloat16", "fp8"]


class Case:
    """Requests of awkward lengths on scattered pages; whatever no request owns is NaN."""

    def __init__(
        self,
        backend: Any,
        name: str,
        heads: int,
        dim: int,
        rows: list[tuple[int, int]],  # (request, context_len) a row
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = backend.device
        self.fmt = IndexKeyFormat(name=name, head_dim=dim)
        requests = 1 + max(request for request, _ in rows)
        lens = [max([n for r, n in rows if r == request] + [0]) for request in range(requests)]
        blocks = max(1, -(-max(lens) // 64))
        self.num_pages = requests * blocks + 1
        ids = torch.randperm(self.num_pages).tolist()
        self.tables = torch.full((requests, blocks + 1), -1, dtype=torch.int32)
        for request, length in enumerate(lens):
            count = -(-length // 64)
            self.tables[request, :count] = torch.tensor([ids.pop() for _ in range(count)])
        # Integers, so that rotating and quantising them is exact in any order of summation.
        self.keys = [torch.randint(-9, 10, (n, dim)).float() for n in lens]
        self.query = torch.randint(-9, 10, (len(rows), heads, dim)).to(dtype)
        self.weights = torch.randn(len(rows), heads)
        if name != "fp8":
            self.keys = [keys * torch.rand(dim) for keys in self.keys]
            self.query = self.query * torch.rand(dim).to(dtype)
        self.request_rows = torch.tensor([r for r, _ in rows], dtype=torch.int32)
        self.lens = torch.tensor([n for _, n in rows], dtype=torch.int32)
        self.pages = self._write()

    def _write(self) -> torch.Tensor:
        pages = torch.full((self.num_pages, self.fmt.page_bytes), POISON, dtype=torch.uint8)
        pages = pages.to(self.device)
        for request, keys in enumerate(self.keys):
            position = torch.arange(keys.shape[0])
            slots = self.tables[request].long()[position // 64] * 64 + position % 64
            slots = slots.to(torch.int32).to(self.device)
            write_index_keys(keys.to(self.device), slots, pages, self.fmt)
        return pages

    def run(self, backend: Any, picked: list[int] | None = None, longest: int | None = None) -> Any:
        """Scores of some rows (all by default), in the order given."""
        rows = torch.tensor(range(len(self.lens)) if picked is None else picked, dtype=torch.long)
        args = [
            self.query[rows],
            self.weights[rows],
            self.pages,
            self.fmt,
            self.tables,
            self.request_rows[rows],
            self.lens[rows],
        ]
        args = [a.to(self.device) if isinstance(a, torch.Tensor) else a for a in args]
        most = int(self.lens[rows].max()) if longest is None else longest
        return backend.op("index_scores")(*args, most).cpu()

    def vectors(self, row: int, e4m3: Any) -> tuple[np.ndarray, np.ndarray]:
        """fp64 query [H, D] and keys [S, D] of one row, as the format stores them."""
        keys, query = self.keys[int(self.request_rows[row])], self.query[row]
        keys = keys[: int(self.lens[row])]
        if self.fmt.name == "fp8":
            return fake_quantise(e4m3, query), fake_quantise(e4m3, keys)
        dtype = getattr(torch, self.fmt.name)
        return query.to(dtype).double().numpy(), keys.to(dtype).double().numpy()


def fake_quantise(e4m3: Any, x: torch.Tensor) -> np.ndarray:
    """Rotate (Sylvester's matrix), quantise with a power-of-two scale, and undo the scale."""
    size = x.shape[-1]
    common = np.arange(size)[:, None] & np.arange(size)
    signs = 1.0 - 2.0 * (np.array([[bin(c).count("1") for c in row] for row in common]) % 2)
    rotated = (x.double().numpy() @ signs).astype(np.float32) * np.float32(size**-0.5)
    rotated = torch.from_numpy(rotated).to(x.dtype).double().numpy()
    amax = np.maximum(np.abs(rotated).max(axis=-1, keepdims=True), 1e-4)
    scales = 2.0 ** np.ceil(np.log2(amax / 448))
    return e4m3.decode(e4m3.encode(rotated / scales)) * scales


ROWS = [(0, 130), (0, 131), (1, 1), (2, 63), (3, 64), (3, 65), (4, 128), (0, 0), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads, dim", [(32, 128), (4, 32), (3, 64)])
def test_scores_equal_the_dense_ones(
    backend: Any, e4m3: Any, name: str, heads: int, dim: int, dtype: torch.dtype
) -> None:
    case = Case(backend, name, heads, dim, ROWS, dtype)
    scores = case.run(backend)
    assert scores.shape == (len(ROWS), 192) and scores.dtype == torch.float32
    for row, (_, length) in enumerate(ROWS):
        assert (scores[row, length:] == -torch.inf).all()
        if not length:
            continue
        query, keys = case.vectors(row, e4m3)
        weights = case.weights[row].double().numpy()
        heads_dots = np.maximum(query @ keys.T * dim**-0.5, 0)
        exact = torch.from_numpy(weights @ heads_dots)
        plain = plain_fp32(query, keys, weights)
        size = torch.from_numpy(np.abs(weights) @ heads_dots).max()
        allowed = 2 * (plain - exact).abs().max() + 2e-7 * size
        if name == "fp8" and backend.device.type == "cuda":
            # Hopper's fp8 products keep about 13 bits below the largest of an instruction.
            allowed = allowed + 2**-11 * size
        assert (scores[row, :length] - exact).abs().max() <= allowed


def plain_fp32(query: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> torch.Tensor:
    """The same formula in straightforward fp32 PyTorch: how far off that is sets the tolerance."""
    q, k, w = (torch.from_numpy(x).float() for x in (query, keys, weights))
    return torch.einsum("h,hs->s", w, torch.relu(q @ k.T * q.shape[-1] ** -0.5)).double()


@pytest.mark.parametrize("name", FORMATS)
def test_a_key_opposed_to_every_head_scores_exactly_zero(backend: Any, name: str) -> None:
    case = Case(backend, name, 4, 32, [(0, 70)])
    case.query = -case.keys[0][:1].repeat(4, 1)[None].contiguous()
    scores = case.run(backend)
    assert scores[0, 0] == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads, dim", [(32, 128), (3, 32), (1, 64)])
def test_a_rows_bits_do_not_depend_on_the_rest_of_the_pass(
    backend: Any, name: str, heads: int, dim: int
) -> None:
    """Alone in a padded pass, first or last, short or long neighbours: the same bits."""
    rows = [(0, 195 + i) for i in range(10)] + [(1, 62 + i) for i in range(3)]
    rows += [(2, 1), (3, 130), (3, 131)] + [(4, 1 + i) for i in range(13)] + [(0, 0)] * 3
    neighbours = 31
    if backend.interpreted:
        rows, neighbours = rows[8:15] + rows[-1:], 1
    case = Case(backend, name, heads, dim, rows)
    together = case.run(backend)
    padding = len(rows) - 1
    for row in range(0, padding, 1 if backend.name == "reference" else 3):
        length = int(case.lens[row])
        if not length:
            continue
        alone = case.run(backend, [row] + [padding] * neighbours, length)
        assert torch.equal(alone[0, :length], together[row, :length]), f"row {row} alone"
        pair = case.run(backend, [row, 0, padding], max(length, int(case.lens[0])))
        assert torch.equal(pair[0, :length], together[row, :length]), f"row {row} beside row 0"


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("heads, dim", [(32, 128), (1, 32), (3, 128)])
def test_reference_bits_do_not_depend_on_the_run_length(
    reference: Any, threads: int, heads: int, dim: int, request: pytest.FixtureRequest
) -> None:
    """One request's rows scored 1, 2, ... 32 at a time: MKL must not see the difference."""
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    torch.set_num_threads(threads)
    case = Case(reference, "float32", heads, dim, [(0, 1200 + i) for i in range(32)])
    together = case.run(reference)
    for count in (1, 2, 3, 9, 10, 11, 17, 31):
        part = case.run(reference, list(range(count)))
        for row in range(count):
            assert torch.equal(part[row, : 1200 + row], together[row, : 1200 + row])


def test_width_covers_the_longest_row(backend: Any) -> None:
    case = Case(backend, "float32", 4, 32, [(0, 0), (0, 0)])
    assert case.run(backend).shape == (2, 64)
    case = Case(backend, "float32", 4, 32, [(0, 65)])
    longer = case.run(backend, longest=128)
    assert longer.shape == (1, 128) and (longer[0, 65:] == -torch.inf).all()


def test_scores_refuse_what_does_not_fit(backend: Any) -> None:
    case = Case(backend, "float32", 4, 32, [(0, 65)])
    with pytest.raises(ValueError, match=r"max_context_len 300 does not fit .* 3 blocks of 64"):
        case.run(backend, longest=300)
    case.weights = case.weights.double()
    with pytest.raises(ValueError, match=r"weights must be torch.float32, got torch.float64"):
        case.run(backend)


def test_keys_past_4_gib_are_read_from_where_they_are(backend: Any, lazy_bytes: Any) -> None:
    case = Case(backend, "fp8", 4, 128, [(0, 130)])
    near = case.run(backend)
    page_bytes = case.fmt.page_bytes
    num_pages = 2**32 // page_bytes + 2
    pages = lazy_bytes(num_pages * page_bytes, case.device).view(num_pages, -1)
    far_ids = torch.tensor([num_pages - 1, 2**31 // page_bytes + 1, 0])
    pages[far_ids.to(case.device)] = case.pages[case.tables[0, :3].long().to(case.device)]
    case.pages, case.tables = pages, far_ids.to(torch.int32)[None]
    assert torch.equal(case.run(backend), near)
