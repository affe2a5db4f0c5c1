"""The sampler against a naive float64 version, and the independence of a row from its batch."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from echokv.engine.request import Request
from echokv.engine.sampler import Sampled, Sampler, finish, uniform
from echokv.engine.sampling_params import SamplingParams
from echokv.errors import RequestError
from echokv.kernels.registry import load_kernels

VOCAB = 50
KERNELS = load_kernels("reference", torch.device("cpu"))


def make_request(prompt: list[int], output: list[int], **params: Any) -> Request:
    request = Request(
        "r",
        prompt,
        SamplingParams(**params),
        max_total_tokens=1000,
        seed=params.get("seed") or 0,
    )
    request.token_ids += output
    return request


def sample(logits: torch.Tensor, requests: list[Request], eos: tuple[int, ...]) -> list[Sampled]:
    draws = Sampler(eos, KERNELS).sample(logits, requests)
    reports = [(row, values.tolist(), tokens.tolist()) for row, values, tokens in draws.reports]
    return finish(draws.token_ids.tolist(), reports)


def sample_one(logits: torch.Tensor, request: Request, eos: tuple[int, ...] = ()) -> int:
    return sample(logits.clone().unsqueeze(0), [request], eos)[0].token_id


def allowed_tokens(logits: torch.Tensor, request: Request, draws: int = 400) -> Counter[int]:
    """Tokens drawn over many seeds."""
    counts: Counter[int] = Counter()
    for seed in range(draws):
        request.seed = seed
        counts[sample_one(logits, request)] += 1
    return counts


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def test_temperature_zero_takes_the_most_likely_token(logits: torch.Tensor) -> None:
    assert sample_one(logits, make_request([1], [], temperature=0)) == int(logits.argmax())


def test_a_tiny_temperature_is_almost_greedy_and_never_nan(logits: torch.Tensor) -> None:
    request = make_request([1], [], temperature=1e-8)
    assert set(allowed_tokens(logits * 1000, request, 20)) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [1, 2, 7, VOCAB, VOCAB + 5])
def test_top_k_keeps_exactly_the_k_most_likely(logits: torch.Tensor, top_k: int) -> None:
    best = set(logits.topk(min(top_k, VOCAB)).indices.tolist())
    assert set(allowed_tokens(logits, make_request([1], [], top_k=top_k))) <= best


def test_top_k_breaks_ties_by_the_lower_token_id() -> None:
    assert set(allowed_tokens(torch.zeros(VOCAB), make_request([1], [], top_k=3))) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: torch.Tensor, top_p: float) -> None:
    probs = logits.double().softmax(-1)
    kept, mass = set(), 0.0
    for token in probs.argsort(descending=True).tolist():
        kept.add(token)
        mass += float(probs[token])
        if mass >= top_p:
            break
    drawn = allowed_tokens(logits, make_request([1], [], top_p=top_p))
    assert set(drawn) <= kept
    assert len(kept) > 12 or set(drawn) == kept


def test_min_p_drops_tokens_below_a_share_of_the_best(logits: torch.Tensor) -> None:
    probs = logits.double().softmax(-1)
    kept = {t for t in range(VOCAB) if probs[t] >= 0.3 * probs.max()}
    assert set(allowed_tokens(logits, make_request([1], [], min_p=0.3))) == kept


def test_draws_follow_the_softmax(logits: torch.Tensor) -> None:
    draws = 4000
    counts = allowed_tokens(logits, make_request([1], [], temperature=1.3), draws)
    probs = (logits.double() / 1.3).softmax(-1)
    chi2 = sum(
        (counts[t] - draws * float(probs[t])) ** 2 / (draws * float(probs[t])) for t in range(VOCAB)
    )
    assert chi2 < VOCAB + 6 * math.sqrt(2 * VOCAB)


def test_penalties_match_their_formulas(logits: torch.Tensor) -> None:
    request = make_request(
        [3, 4],
        [5, 5, 4],
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.5,
        temperature=0,
    )
    expected = logits.double().clone()
    for token in (3, 4, 5):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, count in Counter([5, 5, 4]).items():
        expected[token] -= 0.7 + 0.4 * count
    row = logits.clone().unsqueeze(0)
    sample(row, [request], ())
    torch.testing.assert_close(row[0].double(), expected, atol=1e-6, rtol=1e-6)


def test_a_tiny_repetition_penalty_overflows_to_no_nan(logits: torch.Tensor) -> None:
    seen = logits.topk(3).indices.tolist()
    request = make_request(seen, [], repetition_penalty=1e-320)
    assert set(allowed_tokens(logits, request, 50)) <= set(seen)


def test_logits_of_inference_mode_can_be_penalised(logits: torch.Tensor) -> None:
    with torch.inference_mode():
        row = logits.clone().unsqueeze(0)
    sample(row, [make_request([1], [2], presence_penalty=1, min_tokens=3)], (0,))


def test_ends_are_suppressed_before_min_tokens(logits: torch.Tensor) -> None:
    best, second = logits.topk(2).indices.tolist()
    request = make_request([1], [], min_tokens=1, temperature=0)
    assert sample_one(logits, request, eos=(best,)) == second
    request.token_ids.append(0)
    assert sample_one(logits, request, eos=(best,)) == best


def test_logprobs_are_of_the_raw_distribution(logits: torch.Tensor) -> None:
    request = make_request([1], [2, 2], logprobs=3, temperature=0, frequency_penalty=2)
    result = sample(logits.clone().unsqueeze(0), [request], ())[0]
    expected = logits.double().log_softmax(-1)
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-5)
    assert [token for token, _ in result.logprobs.top] == expected.topk(3).indices.tolist()


def test_zero_logprobs_report_the_sampled_token_alone(logits: torch.Tensor) -> None:
    result = sample(logits.unsqueeze(0), [make_request([1], [], logprobs=0)], ())[0]
    assert result.logprobs is not None and result.logprobs.top == ()


def test_a_seeded_row_is_the_same_whatever_shares_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 1031, generator=generator)
    requests = [
        make_request([1], [2] * i, seed=i, temperature=t, top_p=p, top_k=k)
        for i, (t, p, k) in enumerate(
            [
                (1, 1, 0),
                (0, 1, 0),
                (0.7, 0.9, 0),
                (2, 1, 40),
                (1, 0.5, 5),
                (0, 1, 0),
                (1, 1, 0),
                (0.3, 0.95, 100),
                (1.7, 0.99, 0),
            ]
        )
    ]
    together = [s.token_id for s in sample(rows.clone(), requests, ())]
    alone = [sample_one(rows[i], requests[i]) for i in range(9)]
    backwards = [s.token_id for s in sample(rows.flip(0).contiguous(), requests[::-1], ())]
    assert together == alone == backwards[::-1]


def test_the_uniform_number_is_fixed_by_seed_and_index() -> None:
    values = [uniform(seed, index) for seed in (0, 1, -5) for index in range(1000)]
    assert all(0 <= value < 1 for value in values) and len(set(values)) == len(values)
    assert abs(sum(values) / len(values) - 0.5) < 0.03
    assert uniform(7, 3) == uniform(7, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("seed", 2**63),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert repr(value) in str(caught.value)
