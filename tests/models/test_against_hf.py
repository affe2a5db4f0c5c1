"""Logits and selections against Hugging Face's implementation, on checkpoints written to disk."""

from pathlib import Path

import pytest
import torch
from tests.models.harness import Oracle, Runner
from torch import Tensor

from echokv.cache.manager import CacheManager
from echokv.models.random_checkpoint import write_random_checkpoint

LENGTH = 203  # more than three times index_topk, and not a multiple of anything
TOLERANCE = 1e-4

V32 = {"torch_dtype": "float32", "vocab_size": 300}
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "indexer_types": ["full", "shared", "full", "shared"],
    "rope_scaling": None,
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "qk_nope_head_dim": 96,
    "v_head_dim": 128,
    "torch_dtype": "float32",
}


def token_ids(seed: int, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


class Case:
    """A checkpoint, a prompt, and what HF makes of it."""

    def __init__(self, path: Path, overrides: dict[str, object]) -> None:
        self.path = write_random_checkpoint(path, seed=3, **overrides)
        self.ids = token_ids(seed=11)
        self.oracle = Oracle(self.path)
        self.expected = self.oracle.logits("a", self.ids)

    def check(self, runner: Runner, logits: Tensor) -> None:
        assert (logits - self.expected).abs().max() <= TOLERANCE
        assert runner.selected == self.oracle.selected


@pytest.fixture(scope="module", params=["v32", "glm"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    overrides = {"v32": V32, "glm": GLM}[request.param]
    return Case(tmp_path_factory.mktemp(request.param), overrides)


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("v32"), V32)


def test_the_oracle_is_sparse_and_runs_the_indexer_where_the_config_says(case: Case) -> None:
    layers = {layer for _, layer, _ in case.oracle.selected}
    assert layers == set(Runner(case.path).config.index_layers)
    assert len(case.oracle.selected["a", 0, LENGTH - 1]) == 64
    assert len(case.oracle.selected["a", 0, 10]) == 11


@pytest.mark.parametrize("chunk", [32, 13])
def test_chunked_prefill(case: Case, chunk: int) -> None:
    runner = Runner(case.path)
    case.check(runner, runner.prefill("a", case.ids, chunk))


def test_whole_prefill_in_one_pass_without_a_tile(case: Case) -> None:
    runner = Runner(case.path, tile=None)
    case.check(runner, runner.prefill("a", case.ids, None))


def test_token_by_token(case: Case) -> None:
    runner = Runner(case.path, pool_tokens=130)
    prompt = runner.prefill("a", case.ids[:150])
    steps = [runner.logits(("a", [token])) for token in case.ids[150:]]
    case.check(runner, torch.cat([prompt, *steps]))


@pytest.mark.parametrize("pool_tokens", [64, 65, 150])
def test_offloading_changes_no_bit(case: Case, pool_tokens: int) -> None:
    """Pools of exactly k, k + 1 and two tokens' selections: evictions, recalls, copies."""
    resident = Runner(case.path)
    expected = resident.prefill("a", case.ids)
    offloaded = Runner(case.path, pool_tokens=pool_tokens)
    logits = offloaded.prefill("a", case.ids)
    assert torch.equal(logits, expected)
    case.check(offloaded, logits)
    offloaded.cache.check()
    assert isinstance(offloaded.cache, CacheManager)
    for counters in offloaded.cache.counters():
        assert counters.evicted >= LENGTH - pool_tokens  # each row has been in the pool
        assert counters.recalled > LENGTH - pool_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_token_has_the_same_bits_whatever_shares_its_pass(v32: Case, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    alone = Runner(v32.path, dtype=dtype, rows=name, keys=name)
    expected = torch.cat([alone.run(("a", [token])) for token in v32.ids[:45]])
    together = Runner(v32.path, dtype=dtype, rows=name, keys=name, pool_tokens=200)
    others = {name: token_ids(seed) for seed, name in enumerate("bcd")}
    together.prefill("d", others["d"][:100])
    parts: list[Tensor] = []
    for at in range(0, 45, 9):  # others come before and after, in lengths that shift "a" about
        before = others["b"][2 * at : 2 * at + at // 9]
        segments = [("b", before)] if before else []
        segments += [("a", v32.ids[at : at + 9]), ("c", others["c"][at : at + 9]), ("d", [at])]
        parts.append(together.run(*segments)[len(before) : len(before) + 9])
    assert torch.equal(torch.cat(parts), expected)


def bfloat16_errors(path: Path, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Differences to HF in float32, of us and of HF in bfloat16."""
    expected = Oracle(path).logits("a", ids)
    peer = Oracle(path, torch.bfloat16).logits("a", ids)
    ours = Runner(path, dtype=torch.bfloat16, rows="bfloat16", keys="bfloat16").prefill("a", ids)
    assert ours.dtype == torch.float32
    return (ours - expected).abs(), (peer - expected).abs()


def test_bfloat16_is_at_most_twice_as_far_off_as_hf(v32: Case) -> None:
    error, peer_error = bfloat16_errors(v32.path, v32.ids)
    assert error.mean() <= 2 * peer_error.mean()


def test_bfloat16_is_at_most_twice_as_far_off_as_hf_anywhere(tmp_path: Path) -> None:
    """Without choices that rounding can flip (experts, top-k), the largest error obeys too."""
    write_random_checkpoint(tmp_path, first_k_dense_replace=4, torch_dtype="float32")
    error, peer_error = bfloat16_errors(tmp_path, token_ids(5, 64))
    assert error.max() <= 2 * peer_error.max()
    assert error.mean() <= 2 * peer_error.mean()


def test_fp8_rows_and_keys_stay_near(v32: Case) -> None:
    """Quantised storage: short contexts, where nothing is left out, differ by rounding alone."""
    runner = Runner(v32.path, rows="fp8_ds_mla", keys="fp8", pool_tokens=100)
    logits = runner.prefill("a", v32.ids[:64])
    error = (logits - v32.expected[:64]).abs()
    assert error.mean() < 0.1 * v32.expected.std()
    assert error.mean() > 1e-4  # it was quantised
