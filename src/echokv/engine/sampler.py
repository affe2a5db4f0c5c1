"""What a step's requests ask of their next tokens, and the tokens with their log-probabilities.

Turns parameters into the tensors of `engine.draw`, which draws; applies the penalties, which need
every earlier token on the CPU and are never part of a captured step.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echokv.engine.draw import (
    ALL_TOKENS,
    COLUMNS,
    GREEDY,
    MAX_CANDIDATES,
    MAX_ENDS,
    Described,
    DrawInputs,
    Method,
    draw,
)
from echokv.engine.outputs import TokenLogprobs
from echokv.engine.request import Request
from echokv.engine.sampling_params import SamplingParams
from echokv.kernels.protocol import Kernels

_FINITE = torch.finfo(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One sampled token and, where asked for, its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Sampled tokens while they are on the device, and what is reported about them.

    `reports` has (row, [1 + n] float32 log-probabilities, [n] int64 tokens): the drawn token's,
    then the n most likely tokens'.
    """

    token_ids: Tensor  # [S] int64
    reports: list[tuple[int, Tensor, Tensor]]


class Sampler:
    """Samples the next tokens of a batch; never waits for the device.

    Args:
        eos_token_ids: tokens that end a request; suppressed before min_tokens.
        kernels: the backend.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], kernels: Kernels) -> None:
        self._eos_token_ids = eos_token_ids
        self._kernels = kernels

    def captured_method(self, requests: Sequence[Request]) -> Method | None:
        """How a captured step draws for these requests; None: `sample` must, from its logits."""
        method = Method.GREEDY
        for request in requests:
            params = request.params
            ends = len(self._ends(request))
            if params.logprobs is not None or params.is_penalised or ends > MAX_ENDS:
                return None
            suppressing = Method.PLAIN if ends else Method.GREEDY
            method = Method.join(method, _needed(params), suppressing)
        return method

    def describe(self, request: Request) -> Described:
        """A request's row of `DrawInputs.numbers`, and the tokens that it must not draw now."""
        params = request.params
        ends = self._ends(request)
        if params.is_greedy:
            return GREEDY, ends
        top_k = params.top_k if params.top_k > 0 else ALL_TOKENS
        number = uniform(request.seed, request.next_output_index)
        return (params.temperature, top_k, params.top_p, params.min_p, number), ends

    @torch.inference_mode()
    def sample(self, logits: Tensor, requests: Sequence[Request]) -> Draws:
        """Sample the next token of each request.

        Args:
            logits: [S, V] float32, raw model output, one row a request; modified in place.
            requests: S requests whose params and tokens the rows are for; those with penalties
                have no token that the CPU doesn't know.
        """
        raw = {
            row: logits[row].log_softmax(dim=-1)
            for row, request in enumerate(requests)
            if request.params.logprobs is not None
        }
        numbers = []
        method = Method.GREEDY
        for row, request in enumerate(requests):
            _apply_penalties(logits[row], request)
            described, ends = self.describe(request)
            numbers.append(described)
            if ends:
                logits[row, _indices(ends, logits.device)] = -torch.inf
            method = Method.join(method, _needed(request.params))
        device = logits.device
        columns = list(zip(*numbers, strict=True)) or [()] * len(COLUMNS)
        inputs = DrawInputs(
            torch.tensor(columns, dtype=torch.float64).to(device, non_blocking=True),
            torch.full((len(requests), MAX_ENDS), -1, dtype=torch.int32, device=device),
        )
        token_ids = draw(logits, inputs, method, self._kernels)
        return Draws(
            token_ids=token_ids,
            reports=[(row, *_report(raw[row], token_ids[row], requests[row])) for row in raw],
        )

    def _ends(self, request: Request) -> list[int]:
        if request.next_output_index >= request.params.min_tokens:
            return []
        return sorted({*self._eos_token_ids, *request.params.stop_token_ids})


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of a request's index-th output token."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / float(1 << 53)


def finish(
    token_ids: Sequence[int], reports: Sequence[tuple[int, list[float], list[int]]]
) -> list[Sampled]:
    """What was sampled, once it is on the CPU; the arguments are those of `Draws`, as lists."""
    logprobs = {
        row: TokenLogprobs(
            token_id=token_ids[row],
            logprob=values[0],
            top=tuple(zip(tokens, values[1:], strict=True)),
        )
        for row, values, tokens in reports
    }
    return [
        Sampled(token_id=token, logprobs=logprobs.get(row)) for row, token in enumerate(token_ids)
    ]


def _needed(params: SamplingParams) -> Method:
    if params.is_greedy:
        return Method.GREEDY
    if 0 < params.top_k <= MAX_CANDIDATES:
        return Method.LIMITED
    return Method.PLAIN if params.top_k <= 0 and params.top_p == 1 else Method.SORTED


def _apply_penalties(logits: Tensor, request: Request) -> None:
    """In place, [V]: HF's repetition penalty, OpenAI's presence and frequency penalties."""
    params, device = request.params, logits.device
    if not params.is_penalised:
        return
    assert request.num_pending_tokens == 0, "the engine lets no penalised request run ahead"
    if params.repetition_penalty != 1.0:
        seen = _indices(sorted(set(request.token_ids)), device)
        values = logits[seen]
        scaled = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        # A tiny penalty must not overflow to inf, which the draw would turn into NaN.
        logits[seen] = scaled.clamp(_FINITE.min, _FINITE.max)
    if params.presence_penalty or params.frequency_penalty:
        output = _indices(request.output_token_ids, device)
        tokens, counts = output.unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts


def _report(row: Tensor, token_id: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """[1 + n] log-probabilities and [n] tokens; row is [V], the log-softmax of the raw logits."""
    count = request.params.logprobs or 0
    values, tokens = row.topk(min(count, row.shape[0]))
    return torch.cat((row.gather(0, token_id.view(1)), values)), tokens


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
