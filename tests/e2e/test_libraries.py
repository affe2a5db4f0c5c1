"""On a GPU, a block-fp8 model with the libraries' kernels: the device pool changes no token."""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import host_pool_gib, make_engine, python_sources, tokens_of

from echokv.engine.sampling_params import SamplingParams
from echokv.models.random_checkpoint import write_random_checkpoint

TOPK = 64
COMMON: dict[str, Any] = {
    "device": "cuda",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_dtype": "fp8_ds_mla",
    "check_cache": True,
}
KERNELS = {
    "ours": {"attention_kernel": "backend", "gemm_kernel": "backend", "indexer_kernel": "backend"},
    "converted": {"gemm_kernel": "torch"},
    # DeepGEMM compiles a kernel for each shape of a weight: minutes, for this test alone.
    "libraries": {"attention_kernel": "flashmla", "indexer_kernel": "deepgemm"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 656 B, so that FlashMLA can read them, and weights in fp8."""
    return write_random_checkpoint(
        tmp_path_factory.mktemp("fp8"),
        kv_lora_rank=512,
        num_hidden_layers=2,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )


def run(model: Path, **overrides: Any) -> list[list[int]]:
    engine, _ = make_engine(model, observe=False, **COMMON, **overrides)
    tokens = engine.tokenizer.encode(python_sources(20_000))
    prompts = [tokens[:1], tokens[:63], tokens[:700], tokens[:1500], tokens[5000:6000]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    if engine.config.offload:
        assert all(layer.evicted_rows > 0 for layer in engine.stats().layers)
    engine.close()
    return [tokens_of(one) for one in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", KERNELS)
def test_offloaded_equals_resident(model: Path, kernels: str) -> None:
    chosen = KERNELS[kernels]
    expected = run(model, offload=False, device_pool_tokens=128 * 64, **chosen)
    for pool in (9 * TOPK, 1000):
        gib = host_pool_gib(model, 128, "fp8_ds_mla")
        assert run(model, host_pool_gib=gib, device_pool_tokens=pool, **chosen) == expected
