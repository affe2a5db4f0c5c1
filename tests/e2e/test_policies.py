"""A policy decides who stays, never what comes out: hostile priorities, the same tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.e2e.harness import host_pool_gib, python_sources, tokens_of
from torch import Tensor

from echokv.bench.trace_replay import POLICIES
from echokv.config import EngineConfig
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.sampling_params import SamplingParams
from echokv.kernels.cache_args import SCORE_BITS, SCORE_LEVELS
from echokv.kernels.reference.priorities import score_priorities
from echokv.memory.slots import HostSlots

TOPK = 64


class Hostile:
    """A policy from a function of the product's level, 1 to 7."""

    def __init__(self, levels: Callable[[Tensor], Tensor]) -> None:
        self._levels = levels

    def priorities(self, clock: Tensor, scores: Tensor, host_slots: HostSlots) -> Tensor:
        priorities = torch.empty_like(host_slots)
        score_priorities(torch.zeros_like(clock), scores, host_slots, priorities)
        return ((clock << SCORE_BITS) + self._levels(priorities)).to(torch.int32)


RANDOM = torch.Generator().manual_seed(9)
HOSTILE: dict[str, Callable[[Tensor], Tensor]] = {
    "all lowest": torch.ones_like,
    "all highest": lambda level: torch.full_like(level, SCORE_LEVELS),
    "all at the floor": torch.zeros_like,  # even below what is allowed
    "reversed": lambda level: SCORE_LEVELS + 1 - level.clamp(min=1),
    "random": lambda level: torch.randint(1, SCORE_LEVELS + 1, level.shape, generator=RANDOM),
    "by column": lambda level: 1 + torch.arange(level.shape[1]).expand_as(level) % SCORE_LEVELS,
}


def run(model: Path, *, offload: bool, levels: Callable[[Tensor], Tensor] | None) -> list[object]:
    common = {"max_model_len": 512, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    pools = (
        {"device_pool_tokens": 4 * TOPK, "host_pool_gib": host_pool_gib(model, 20)}
        if offload
        else {"device_pool_tokens": 2048}
    )
    engine = Engine(
        EngineConfig(model=str(model), offload=offload, check_cache=True, **common, **pools),
        hooks=EngineHooks(policy=None if levels is None else lambda _: Hostile(levels)),
    )
    tokens = engine.tokenizer.encode(python_sources(1500))
    prompts = [tokens[:330], tokens[100:260], tokens[:230] + tokens[900:930]]
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(3)
    ]
    outputs = [tokens_of(one) for one in engine.generate(prompts, params)]
    stats = engine.stats()
    engine.close()
    if offload:
        assert all(layer.evicted_rows > 0 for layer in stats.layers)
    return [outputs, [layer.recalled_rows for layer in stats.layers]]


@pytest.fixture(scope="module")
def resident(demo_model: Path) -> list[object]:
    return run(demo_model, offload=False, levels=None)


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_priorities_change_no_token(
    demo_model: Path, resident: list[object], name: str
) -> None:
    outputs, recalled = run(demo_model, offload=True, levels=HOSTILE[name])
    assert outputs == resident[0]
    assert min(recalled) > 0  # type: ignore[call-overload]


def test_the_policies_of_the_benchmarks_stay_in_range() -> None:
    clock = torch.tensor([77], dtype=torch.int32)
    scores, slots = torch.randn(4, 9), torch.arange(36, dtype=torch.int32).view(4, 9)
    from echokv.kernels.registry import load_kernels

    for make in POLICIES.values():
        policy = make(load_kernels("reference", torch.device("cpu")))
        priorities = policy.priorities(clock, scores, HostSlots(slots))
        assert priorities.dtype == torch.int32 and priorities.is_contiguous()
        assert ((priorities > 77 << 3) & (priorities < 78 << 3)).all()
