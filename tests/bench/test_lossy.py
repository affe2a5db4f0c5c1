"""Lossy selectors against their definitions, with every query that the model makes written down."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echokv.bench.lossy import (
    LOSSY,
    REFRESH_STEPS,
    LossySelector,
    PreviousLayerInput,
    PreviousStepQuery,
    PreviousStepSet,
)
from echokv.cache.batch import ForwardBatch
from echokv.config import EngineConfig
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams
from echokv.indexer.indexer import Indexer, Selection
from echokv.models.deepseek_v32 import DeepseekV32

PROMPT, STEPS, TOPK, LAYERS = 150, 10, 64, 2


class Spy:
    """Stands between model and lossy selector: what was asked, what came back."""

    def __init__(self, lossy: LossySelector, exact: Indexer) -> None:
        self.lossy, self.exact, self.topk = lossy, exact, lossy.topk
        self.calls: list[tuple[int, int, Tensor, Tensor, Selection, Selection]] = []

    def begin_pass(self, batch: ForwardBatch) -> None:
        self.lossy.begin_pass(batch)

    def append(self, index_layer: int, keys: Tensor, batch: ForwardBatch) -> None:
        self.lossy.append(index_layer, keys, batch)

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        truth = self.exact.select(index_layer, query, weights, batch)
        given = self.lossy.select(index_layer, query, weights, batch)
        if batch.num_real_tokens == 1:
            self.check(index_layer, query, weights, batch, given)
        self.calls.append((index_layer, batch.num_real_tokens, query, weights, truth, given))
        return given

    def check(self, *_: Any) -> None:
        """For tests that must look while the step's keys are the newest."""


def run(model: Path, name: str, spy_type: type[Spy] = Spy) -> Spy:
    spies = []

    def make(network: DeepseekV32, exact: Indexer) -> Spy:
        spies.append(spy_type(LOSSY[name](network, exact), exact))
        return spies[-1]

    config = EngineConfig(
        model=str(model),
        offload=False,
        device_pool_tokens=512,
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=96,
        enable_prefix_caching=False,
    )
    engine = Engine(config, hooks=EngineHooks(selector=make))
    params = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True)
    prompt = torch.randint(0, 256, (PROMPT,), generator=torch.Generator().manual_seed(2)).tolist()
    engine.generate([prompt, prompt[::-1]], params)  # the second starts from the first's leavings
    engine.close()
    return spies[0]


def of_layer(spy: Spy, layer: int) -> list[tuple[int, Tensor, Tensor, Selection, Selection]]:
    return [call[1:] for call in spy.calls if call[0] == layer]


def same(one: Selection, other: Selection) -> bool:
    return torch.equal(one.positions, other.positions) and torch.equal(one.scores, other.scores)


@pytest.mark.parametrize("name", list(LOSSY))
def test_prompts_are_exact_and_decoding_is_not(small_model: Path, name: str) -> None:
    spy = run(small_model, name)
    prompts = [call for call in spy.calls if call[1] > 1]
    decoding = [call for call in spy.calls if call[1] == 1]
    assert len(decoding) == 2 * STEPS * LAYERS
    assert all(same(truth, given) for *_, truth, given in prompts)
    assert any(not same(truth, given) for *_, truth, given in decoding)
    for *_, given in decoding:
        chosen = given.positions[0]
        assert (chosen.diff() > 0).all()  # ascending, distinct, all k of them
        assert torch.equal(given.host_slots[1:], torch.full_like(given.host_slots[1:], -1))
    assert 0 < spy.lossy.found < spy.lossy.wanted


def test_previous_step_query(small_model: Path) -> None:
    class Check(Spy):
        def check(
            self, layer: int, _q: Tensor, _w: Tensor, batch: ForwardBatch, given: Selection
        ) -> None:
            tokens, query, weights, *_ = of_layer(self, layer)[-1]
            rows = [tokens - 1] * batch.num_tokens
            assert same(self.exact.select(layer, query[rows], weights[rows], batch), given)

    run(small_model, "freekv-like", Check)


def test_previous_layer_input(small_model: Path) -> None:
    """The first layer is exact; the second is guessed from the first one's normed input."""
    inputs: dict[int, Tensor] = {}

    class Check(Spy):
        def __init__(self, lossy: LossySelector, exact: Indexer) -> None:
            super().__init__(lossy, exact)
            assert isinstance(lossy, PreviousLayerInput)
            self.network = lossy._attentions
            self.network[0].from_hidden.register_forward_pre_hook(self.note)

        def note(self, _module: object, args: tuple[Tensor, ...]) -> None:
            inputs[0] = args[0]

        def check(
            self, layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch, given: Selection
        ) -> None:
            if layer == 1:
                attention = self.network[1]
                angles = self.lossy._inputs[1][3]  # type: ignore[attr-defined]
                q_a = attention.from_hidden(inputs[0])[0]
                latent = attention.q_a_layernorm(q_a)
                query, weights = attention.indexer.query(inputs[0], latent, angles)
            assert same(self.exact.select(layer, query, weights, batch), given)

    run(small_model, "infinigen-like", Check)


def test_previous_step_set(small_model: Path) -> None:
    spy = run(small_model, "clo-like")
    assert isinstance(spy.lossy, PreviousStepSet)
    for layer in range(LAYERS):
        step, kept, kept_scores = 0, [0], {0: 0.0}
        for tokens, _, _, truth, given in of_layer(spy, layer):
            last = tokens - 1
            if tokens == 1:
                step += 1
                chosen = given.positions[0].tolist()
                if step % REFRESH_STEPS == 0:
                    assert same(truth, given)
                else:
                    weakest = min(kept, key=lambda position: (kept_scores[position], position))
                    newest = PROMPT + step - 1
                    assert chosen == [p for p in kept if p != weakest] + [newest]
            else:
                step = 0
            kept = given.positions[last].tolist()
            kept_scores = dict(zip(kept, given.scores[last].tolist(), strict=True))


def test_every_family_is_named_once() -> None:
    assert set(LOSSY.values()) == {PreviousLayerInput, PreviousStepQuery, PreviousStepSet}
