"""Drawing by each method against exact arithmetic, and captured parameters against eager ones."""

import random
from fractions import Fraction

import pytest
import torch

from echokv.engine.decode_inputs import DecodeInputs
from echokv.engine.draw import (
    ALL_TOKENS,
    GREEDY,
    MAX_CANDIDATES,
    MAX_ENDS,
    DrawInputs,
    Method,
    draw,
    weight_bits,
)
from echokv.engine.request import Request
from echokv.engine.sampler import Sampler
from echokv.engine.sampling_params import SamplingParams
from echokv.engine.scheduler import ScheduledRequest
from echokv.kernels.registry import load_kernels

KERNELS = load_kernels("reference", torch.device("cpu"))
VOCABS = [1, 2, 127, 128, 129, 1024, 1031, 3000]


def make_inputs(rows: list[tuple[float, ...]], ends: dict[int, list[int]]) -> DrawInputs:
    padded = torch.full((len(rows), MAX_ENDS), -1, dtype=torch.int32)
    for row, tokens in ends.items():
        padded[row, : len(tokens)] = torch.tensor(tokens)
    return DrawInputs(torch.tensor(rows, dtype=torch.float64).T.contiguous(), padded)


def exact_token(logits: torch.Tensor, row: tuple[float, ...]) -> tuple[int, Fraction]:
    """The token of one row, and how near the draw came to another, as a share of the whole.

    Weights are the float64 shares as exact fractions, never rounded to integers.
    """
    temperature, top_k, top_p, min_p, uniform = row
    if temperature == 0:
        return int(logits.argmax()), Fraction(1)
    values = logits.double()
    shares = ((values - values.max()) / max(temperature, 1e-6)).exp().tolist()
    order = sorted(range(len(shares)), key=lambda token: (-float(logits[token]), token))
    kept = [token for token in order if shares[token] >= min_p][: int(min(top_k, len(order)))]
    total = sum(Fraction(shares[token]) for token in kept)
    mass, nucleus, margin = Fraction(0), [], Fraction(1)
    for token in kept:
        nucleus.append(token)
        mass += Fraction(shares[token])
        margin = min(margin, abs(mass / total - Fraction(top_p)) if top_p < 1 else margin)
        if mass >= total * Fraction(top_p) and top_p < 1:
            break
    target, at = Fraction(uniform) * mass, Fraction(0)
    for token in sorted(nucleus):
        at += Fraction(shares[token])
        margin = min(margin, abs(at - target) / mass)
        if at > target:
            return token, margin
    raise AssertionError("uniform is below 1")


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_method_draws_the_exact_token(vocab: int) -> None:
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    rows = [
        (
            rng.choice([0.0, 0.3, 1.0, 2.0]),
            rng.choice([1, 2, 7, 50, MAX_CANDIDATES, MAX_CANDIDATES + 1, ALL_TOKENS]),
            rng.choice([1.0, 0.999, 0.9, 0.3, 1e-6]),
            rng.choice([0.0, 0.0, 0.05, 1.0]),
            rng.random(),
        )
        for _ in range(40)
    ]
    logits = torch.randn(40, vocab, generator=generator) * 3
    logits[::3] = logits[::3].round()  # many ties
    inputs = make_inputs(rows, {})
    everything = draw(logits, inputs, Method.SORTED, KERNELS)
    exact = [exact_token(one, row) for one, row in zip(logits, rows, strict=True)]
    sure = Fraction(vocab, 2 ** weight_bits(vocab))  # what rounding may move
    assert sum(margin > sure for _, margin in exact) > 35
    for row, (token, margin) in enumerate(exact):
        assert margin <= sure or int(everything[row]) == token
    for method in set(Method) - {Method.SORTED}:
        served = [
            row for row, asked in enumerate(rows) if Method.join(method, needed(asked)) is method
        ]
        got = draw(logits[served], inputs_of(inputs, served), method, KERNELS)
        assert got.tolist() == everything[served].tolist()


@pytest.mark.parametrize("method", list(Method))
def test_every_backend_draws_the_same_tokens(method: Method) -> None:
    """Triton's kernels, interpreted where there is no GPU; also at a width of several blocks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = random.Random(9)
    logits = torch.randn(12, 2500, generator=torch.Generator().manual_seed(9)) * 3
    asked = [random_row(rng, method) for _ in range(12)]
    inputs = make_inputs(asked, {3: [5, int(logits[3].argmax())]} if method else {})
    expected = draw(logits, inputs, method, KERNELS)
    there = DrawInputs(inputs.numbers.to(device), inputs.ends.to(device))
    got = draw(logits.to(device), there, method, load_kernels("triton", device))
    assert got.tolist() == expected.tolist()


def random_row(rng: random.Random, method: Method) -> tuple[float, ...]:
    """What a row may ask of a method."""
    limited = method is Method.LIMITED or (method is Method.MIXED and rng.random() < 0.5)
    top_k = rng.choice([5, 800]) if limited else ALL_TOKENS
    top_p = 0.9 if limited or method is Method.SORTED else 1.0
    row = rng.choice([0.0, 0.7, 1.0]), top_k, top_p, rng.choice([0.0, 0.01]), rng.random()
    return row if row[0] else GREEDY


def needed(row: tuple[float, ...]) -> Method:
    temperature, top_k, top_p, _, _ = row
    if temperature == 0:
        return Method.GREEDY
    if top_k <= MAX_CANDIDATES:
        return Method.LIMITED
    return Method.PLAIN if top_k == ALL_TOKENS and top_p == 1 else Method.SORTED


def inputs_of(inputs: DrawInputs, rows: list[int]) -> DrawInputs:
    return DrawInputs(inputs.numbers[:, rows], inputs.ends[rows])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("method", set(Method) - {Method.GREEDY})
def test_extreme_draws_stay_among_tokens_with_mass(method: Method, uniform: float) -> None:
    logits = torch.full((3, 300), -torch.inf)
    logits[0, 40] = logits[1, 299] = 1.0
    logits[2, [7, 250]] = torch.tensor([-3e38, 3e38])
    rows = [(1.0, 5.0, 1.0, 0.0, uniform)] * 2 + [(1e-9, 5.0, 1.0, 0.0, uniform)]
    assert draw(logits, make_inputs(rows, {}), method, KERNELS).tolist() == [40, 299, 250]


def test_equal_logits_are_drawn_in_the_order_of_ids() -> None:
    rows = [(1.0, ALL_TOKENS, 1.0, 0.0, (index + 0.5) / 200) for index in range(200)]
    tokens = draw(torch.zeros(200, 200), make_inputs(rows, {}), Method.PLAIN, KERNELS)
    assert tokens.tolist() == list(range(200))


def test_suppressed_tokens_are_never_drawn() -> None:
    logits = torch.zeros(3, 9)
    logits[:, 4] = 5
    rows = [GREEDY, GREEDY, (1.0, 1.0, 1.0, 0.0, 0.9)]
    inputs = make_inputs(rows, {1: [4], 2: [0, 1, 4]})
    assert draw(logits, inputs, Method.SORTED, KERNELS).tolist() == [4, 0, 2]
    assert logits[0, 4] == 5 and logits[1, 4] == 5  # the logits are another reader's


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_k=rng.choice([0, -1, 3, 40, 2000]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]),
        min_tokens=rng.choice([0, 0, 20]),
        stop_token_ids=tuple(rng.sample(range(40), rng.choice([0, 2, MAX_ENDS]))),
        max_tokens=100,
    )


@pytest.mark.parametrize("seed", range(6))
def test_captured_draws_are_the_eager_samplers(seed: int) -> None:
    """What a graph replays, `draw` over fixed buffers, and what runs without one."""
    rng = random.Random(seed)
    sampler = Sampler((0, 5), KERNELS)
    buffers = DecodeInputs(24, 640, torch.device("cpu"), torch.zeros(24, dtype=torch.int64))
    seen = set()
    for _ in range(20):
        requests = []
        for index in range(rng.randint(1, 20)):
            tokens = list(range(1, rng.randint(2, 60)))
            request = Request(str(index), tokens, random_params(rng), max_total_tokens=900, seed=7)
            request.token_ids += [3] * rng.choice([0, 4, 30])
            request.block_ids = list(range(9))
            requests.append(request)
        logits = torch.randn(24, 1500) * 4
        eager = sampler.sample(logits[: len(requests)].clone(), requests).token_ids
        method = sampler.captured_method(requests)
        if method is None:
            assert any(len(r.params.stop_token_ids) == MAX_ENDS for r in requests)
            continue
        seen.add(method)
        items = [ScheduledRequest(request=r, start=r.num_tokens - 1, count=1) for r in requests]
        described = [] if method is Method.GREEDY else [sampler.describe(r) for r in requests]
        buffers.fill(items, described)
        captured = draw(logits, buffers.draws(24), method, KERNELS)
        assert captured[: len(requests)].tolist() == eager.tolist()
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("params", "method"),
    [
        (SamplingParams(temperature=0), Method.GREEDY),
        (SamplingParams(temperature=0, top_k=5, top_p=0.5), Method.GREEDY),
        (SamplingParams(temperature=0, min_tokens=1), Method.PLAIN),
        (SamplingParams(), Method.PLAIN),
        (SamplingParams(min_p=0.1), Method.PLAIN),
        (SamplingParams(top_k=MAX_CANDIDATES, top_p=0.9), Method.LIMITED),
        (SamplingParams(top_k=MAX_CANDIDATES + 1), Method.SORTED),
        (SamplingParams(top_p=0.9), Method.SORTED),
        (SamplingParams(temperature=0, logprobs=0), None),
        (SamplingParams(temperature=0, frequency_penalty=0.1), None),
        (SamplingParams(repetition_penalty=0.9), None),
        (SamplingParams(min_tokens=1, stop_token_ids=tuple(range(10, 19))), None),
    ],
)
def test_a_batch_is_drawn_by_what_its_rows_need(
    params: SamplingParams, method: Method | None
) -> None:
    request = Request("r", [1], params, max_total_tokens=10, seed=0)
    greedy = Request("g", [1], SamplingParams(temperature=0), max_total_tokens=10, seed=0)
    assert Sampler((0,), KERNELS).captured_method([request, greedy]) is method


@pytest.mark.gpu
@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("rows", [1, 70])
def test_a_gpu_draws_the_tokens_of_the_cpu(method: Method, rows: int) -> None:
    """At DeepSeek-V3.2's vocabulary; as a captured graph, twice."""
    rng = random.Random(rows)
    vocab, gpu = 129_280, torch.device("cuda")
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3
    asked = [random_row(rng, method) for _ in range(rows)]
    inputs = make_inputs(asked, {0: [int(logits[0].argmax())]} if method else {})
    expected = draw(logits, inputs, method, KERNELS)
    on_gpu = DrawInputs(inputs.numbers.to(gpu), inputs.ends.to(gpu))
    kernels, there = load_kernels("triton", gpu), logits.to(gpu)
    assert draw(there, on_gpu, method, kernels).tolist() == expected.tolist()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw(there, on_gpu, method, kernels)
    for _ in range(2):
        captured.fill_(-1)
        graph.replay()
        assert captured.tolist() == expected.tolist()
