"""Index scores over whole sequences: selecting, and training the indexer (DeepSeek-V3.2, 2.1).

The indexer learns by KL to the attention distribution, summed over heads and normalised, on a
sample of the queries: those that answer, and others at random.
"""

import torch
from torch import Tensor
from torch.nn import functional

QUERY_BLOCK = 1024


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """sum_h w_h relu(q_h . k); the weights carry the scales.

    Args:
        query: [B, M, H, D].
        keys: [B, T, D].
        weights: [B, M, H] float32.

    Returns:
        [B, M, T] float32.
    """
    batch, rows, heads, _ = query.shape
    products = torch.bmm(query.flatten(1, 2), keys.transpose(1, 2)).relu()  # [B, M * H, T]
    products = products.view(batch * rows, heads, -1)
    summed = torch.bmm(weights.to(products.dtype).view(-1, 1, heads), products)
    return summed.view(batch, rows, -1).float()


class SparseMask:
    """The indexer's selection of every query, as an additive mask.

    Args:
        query: [B, T, H, D]; keys: [B, T, D]; weights: [B, T, H].
        k: tokens selected.

    Attributes:
        bias: [B, 1, T, T] in the query's dtype, 0 or -inf.
    """

    @torch.no_grad()
    def __init__(self, query: Tensor, keys: Tensor, weights: Tensor, k: int) -> None:
        batch, length = keys.shape[:2]
        bias = query.new_full((batch, 1, length, length), float("-inf"))
        for start in range(0, length, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, length)
            rows = slice(start, end)
            for sequence in range(batch):
                one = slice(sequence, sequence + 1)
                scores = index_scores(query[one, rows], keys[one, :end], weights[one, rows])[0]
                scores = scores.masked_fill(~_causal(start, end, keys.device), float("-inf"))
                kth = scores.topk(min(k, end), dim=-1).values[:, -1:]
                chosen = (scores >= kth) & (scores > float("-inf"))
                bias[sequence, 0, rows, :end].masked_fill_(chosen, 0.0)
        self.bias = bias

    def rows(self, positions: Tensor) -> Tensor:
        """[B, M, T] bool at query positions [B, M]."""
        batch = torch.arange(positions.shape[0], device=positions.device)[:, None]
        return self.bias[batch, 0, positions] == 0


def _causal(start: int, end: int, device: torch.device) -> Tensor:
    """[end - start, end] bool: the keys that queries from `start` on may see."""
    keys = torch.arange(end, device=device)
    return keys <= torch.arange(start, end, device=device)[:, None]


class IndexerLoss:
    """KL(attention || softmax of index scores) on sampled queries.

    Args:
        positions: [B, M] int64, the queries.
    """

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions

    @classmethod
    def sample(cls, is_answer: Tensor, count: int) -> "IndexerLoss":
        """Half of the queries among those whose targets are answers, half anywhere.

        Args:
            is_answer: [B, T] bool.
            count: queries a sequence.
        """
        noise = torch.rand(is_answer.shape, device=is_answer.device)
        favoured = (noise + is_answer).topk(count // 2, dim=1).indices
        anywhere = torch.randint(
            is_answer.shape[1], (is_answer.shape[0], count - count // 2), device=is_answer.device
        )
        return cls(torch.cat((favoured, anywhere), 1))

    def __call__(
        self,
        index_query: Tensor,
        index_keys: Tensor,
        weights: Tensor,
        query: Tensor,
        key: Tensor,
        mask: SparseMask | None,
    ) -> Tensor:
        """Mean KL over the sampled queries.

        Args:
            index_query: [B, T, H, D].
            index_keys: [B, T, D].
            weights: [B, T, H].
            query: attention's, [B, heads, T, d].
            key: likewise.
            mask: the selection, outside of which neither distribution has mass.
        """
        at = self._positions
        batch = torch.arange(at.shape[0], device=at.device)[:, None]
        scores = index_scores(index_query[batch, at], index_keys, weights[batch, at])
        seen = torch.arange(key.shape[2], device=at.device) <= at[:, :, None]  # [B, M, T]
        if mask is not None:
            seen = seen & mask.rows(at)
        target = self._attention(query, key, seen)
        predicted = functional.log_softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        gap = target * (target.clamp_min(1e-12).log() - predicted.masked_fill(~seen, 0.0))
        return gap.sum(-1).mean()

    @torch.no_grad()
    def _attention(self, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        """[B, M, T] float32: attention of the sampled queries, the mean over heads."""
        at = self._positions
        batch = torch.arange(at.shape[0], device=at.device)[:, None]
        sampled = query.transpose(1, 2)[batch, at].transpose(1, 2)  # [B, heads, M, d]
        total = torch.zeros(seen.shape, device=at.device)
        for head in range(query.shape[1]):
            scores = (sampled[:, head] @ key[:, head].transpose(1, 2)).float()
            scores = (scores * query.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
            total += scores.softmax(-1)
        return total / query.shape[1]
