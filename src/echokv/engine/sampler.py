"""Logits to tokens: penalties, temperature, min-p, top-k, top-p, one random number a token.

A row's result depends on that row and its request alone, so a seeded request gives the same tokens
whatever shares its batch: each output token draws one uniform number from (seed, output index) and
inverts the cumulative distribution.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.engine.outputs import TokenLogprobs
from echokv.engine.request import Request

_FINITE = torch.finfo(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One sampled token and, where asked for, its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None


@torch.inference_mode()
def sample(
    logits: Tensor, requests: list[Request], eos_token_ids: tuple[int, ...]
) -> list[Sampled]:
    """Sample the next token of each request.

    Args:
        logits: [S, V] float32, raw model output, one row a request; modified in place.
        requests: S requests whose params and tokens the rows are for.
        eos_token_ids: tokens that end a request; suppressed before min_tokens.
    """
    reports = _report_rows(logits, requests)
    _apply_penalties(logits, requests)
    _suppress_early_ends(logits, requests, eos_token_ids)
    token_ids = logits.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        token_ids[rows] = _draw(logits[rows], [requests[row] for row in drawn])
    chosen = token_ids.tolist()
    return [
        Sampled(token_id=token, logprobs=_report(reports.get(row), token, requests[row]))
        for row, token in enumerate(chosen)
    ]


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of a request's index-th output token."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / float(1 << 53)


def _draw(logits: Tensor, requests: list[Request]) -> Tensor:
    """Draw from the filtered distribution. [D, V] float32 to [D] int64."""
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    params = [request.params for request in requests]
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    # Subtracting the maximum first keeps a tiny temperature from overflowing to inf - inf.
    ordered = (ordered - ordered[:, :1]) / column([max(p.temperature, 1e-6) for p in params])
    probs = ordered.softmax(dim=-1)
    probs = probs.masked_fill(probs < probs[:, :1] * column([p.min_p for p in params]), 0.0)
    rank = torch.arange(probs.shape[1], device=device)
    kept = column([p.top_k if p.top_k > 0 else probs.shape[1] for p in params])
    probs = probs.masked_fill(rank >= kept, 0.0).double()
    before = probs.cumsum(dim=-1) - probs
    total = probs.sum(dim=-1, keepdim=True)
    probs = probs.masked_fill(before >= total * column([p.top_p for p in params]).double(), 0.0)
    cumulative = probs.cumsum(dim=-1)
    draws = [uniform(request.seed, request.num_output_tokens) for request in requests]
    target = column(draws).double() * cumulative[:, -1:]
    # The first rank whose cumulative mass exceeds the target has mass itself.
    position = torch.searchsorted(cumulative, target, right=True).clamp(max=probs.shape[1] - 1)
    return tokens.gather(1, position).squeeze(1)


def _apply_penalties(logits: Tensor, requests: list[Request]) -> None:
    for row, request in enumerate(requests):
        params = request.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
            values = logits[row, seen]
            scaled = torch.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
            # A tiny penalty must not overflow to inf, which softmax would turn into NaN.
            logits[row, seen] = scaled.clamp(_FINITE.min, _FINITE.max)
        if params.presence_penalty or params.frequency_penalty:
            output = torch.tensor(request.output_token_ids, dtype=torch.int64, device=logits.device)
            tokens, counts = output.unique(return_counts=True)
            logits[row, tokens] -= params.presence_penalty + params.frequency_penalty * counts


def _suppress_early_ends(
    logits: Tensor, requests: list[Request], eos_token_ids: tuple[int, ...]
) -> None:
    for row, request in enumerate(requests):
        if request.num_output_tokens < request.params.min_tokens:
            ends = {*eos_token_ids, *request.params.stop_token_ids}
            logits[row, sorted(ends)] = float("-inf")


def _report_rows(logits: Tensor, requests: list[Request]) -> dict[int, Tensor]:
    """Log-softmax of the raw logits of the rows that report log-probabilities."""
    return {
        row: logits[row].log_softmax(dim=-1)
        for row, request in enumerate(requests)
        if request.params.logprobs is not None
    }


def _report(row: Tensor | None, token_id: int, request: Request) -> TokenLogprobs | None:
    if row is None:
        return None
    count = request.params.logprobs or 0
    values, tokens = row.topk(min(count, row.shape[0]))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(row[token_id]),
        top=tuple(zip(tokens.tolist(), values.tolist(), strict=True)),
    )
