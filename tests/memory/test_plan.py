"""The byte plan against figures worked out by hand, and each way in which it refuses."""

import pytest
from rich.console import Console

from echokv.config import EngineConfig, ModelConfig
from echokv.errors import CapacityError, ConfigError
from echokv.memory.formats import IndexKeyFormat, RowFormat
from echokv.memory.plan import BytePlan, make_plan

GIB = 2**30
LAYERS, TOPK = 61, 2048
FP8_ROW, FP8_KEY = 656 * LAYERS, 132 * LAYERS  # bytes a token, all layers

V32 = {
    "architectures": ["DeepseekV32ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "num_hidden_layers": LAYERS, "num_attention_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "index_n_heads": 64, "index_head_dim": 128, "index_topk": TOPK,
    "max_position_embeddings": 163840,
}  # fmt: skip


def plan(
    *,
    device_gib: float | None = 141,
    host_gib: float = 1024,
    weights_gib: float = 98,
    fmt: str = "fp8_ds_mla",
    model: dict | None = None,
    **flags: object,
) -> BytePlan:
    config = ModelConfig.from_dict(V32 | (model or {}))
    row = RowFormat(name=fmt, latent_dim=512, rope_dim=64)
    key = IndexKeyFormat(name="fp8" if fmt == "fp8_ds_mla" else fmt, head_dim=128)
    return make_plan(
        config,
        EngineConfig(model="m", **flags),
        row,
        key,
        weight_bytes=int(weights_gib * GIB),
        device_bytes=None if device_gib is None else int(device_gib * GIB),
        host_bytes=int(host_gib * GIB),
    )


def test_explicit_sizes_are_honoured_to_the_block() -> None:
    made = plan(host_pool_gib=64.0, device_pool_tokens=200_000)
    slots = int(64 * GIB) // FP8_ROW // 64 * 64
    assert made.host_slots == slots == 1_717_248
    assert made.num_host_blocks == slots // 64
    assert made.device_slots == 200_000
    assert made.nbytes("host pool") == slots * FP8_ROW <= 64 * GIB
    assert made.nbytes("device pool") == 200_000 * FP8_ROW
    assert made.nbytes("index keys") == slots * FP8_KEY
    assert made.nbytes("metadata") == LAYERS * (4 * slots + 13 * 200_000)
    assert made.nbytes("weights") == 98 * GIB
    assert made.max_running == 64
    assert made.max_concurrency == slots // 163840 == 10


def test_shared_layers_have_no_index_keys() -> None:
    kinds = ["full", "shared", *["full"] * 59]
    made = plan(host_pool_gib=64.0, model={"indexer_types": kinds})
    assert made.nbytes("index keys") == made.host_slots * 132 * 60


def test_prefetch_keeps_room_for_what_it_notes() -> None:
    """A host slot and a score of each row that 48 requests may prefetch, in 60 layers, twice."""
    kinds = ["full", "shared", *["full"] * 59]
    flags = {"max_num_seqs": 48, "max_model_len": 100_000, "model": {"indexer_types": kinds}}
    without = plan(prefetch="off", **flags).nbytes("workspace")
    for said in ("decode", "on"):
        kept = plan(prefetch=said, **flags).nbytes("workspace") - without
        assert kept == 2 * 8 * 60 * 48 * (16 + 1500)  # 984,000 B of 656
    wide = plan(prefetch="on", fmt="bfloat16", **flags).nbytes("workspace") - without
    assert wide == 2 * 8 * 60 * 48 * (16 + 854)  # of 1152


def test_defaults_on_a_gpu_use_the_hbm_and_no_more() -> None:
    made = plan()
    total = made.total("HBM")
    assert total <= 141 * GIB
    assert 141 * GIB - total < FP8_ROW + 13 * LAYERS  # not one row more would fit
    per_slot = FP8_KEY + 4 * LAYERS
    left = 141 * GIB - made.nbytes("weights") - made.nbytes("workspace")
    assert left // 2 - per_slot * 64 < made.host_slots * per_slot <= left // 2
    assert made.host_slots % 64 == 0


def test_default_host_pool_is_half_of_host_memory_at_most() -> None:
    made = plan(host_gib=32)
    assert 16 * GIB - 64 * FP8_ROW < made.nbytes("host pool") <= 16 * GIB


def test_default_host_pool_holds_64_requests_at_most() -> None:
    made = plan(max_model_len=1000)
    assert made.host_slots == 64 * 1024  # 1000 tokens take 16 blocks
    assert made.device_slots == made.host_slots  # more would stand empty
    assert made.max_running == 31
    assert made.max_concurrency == 31


def test_an_explicit_device_pool_leaves_the_rest_to_index_keys() -> None:
    made = plan(device_pool_tokens=4096)
    assert made.device_slots == 4096
    assert made.host_slots > plan().host_slots
    assert made.total("HBM") <= 141 * GIB


def test_defaults_on_a_cpu() -> None:
    made = plan(device_gib=None, host_gib=20, max_model_len=15_000, fmt="float32")
    assert made.host_slots == 2 * GIB // (4 * 576 * LAYERS) // 64 * 64 == 15_232
    assert made.device_slots == 4096  # a quarter would be below the least that works
    assert made.total("HBM") == 0
    assert made.nbytes("workspace") == 0


TINY = {"num_hidden_layers": 2, "index_topk": 64, "max_position_embeddings": 4096}


def test_defaults_of_a_tiny_model_on_a_cpu() -> None:
    made = plan(device_gib=None, host_gib=20, weights_gib=0, fmt="float32", model=TINY)
    assert made.host_slots == 64 * 4096  # 64 requests; 1.1 GiB of rows, under the 2 GiB
    assert made.device_slots == 64 * 4096 // 4
    assert made.max_running == 64
    made = plan(device_gib=None, host_gib=1, weights_gib=0, fmt="float32", model=TINY)
    assert made.host_slots == GIB // 2 // (2 * 4 * 576) // 64 * 64


def test_the_device_pool_limits_running_requests() -> None:
    for tokens, running in ((2 * TOPK, 1), (5 * TOPK - 1, 3), (5 * TOPK, 4), (80 * TOPK, 64)):
        made = plan(host_pool_gib=64.0, device_pool_tokens=tokens)
        assert made.max_running == running
    assert plan(host_pool_gib=64.0, device_pool_tokens=80 * TOPK, max_num_seqs=8).max_running == 8


def test_without_offload_rows_and_keys_share_the_hbm() -> None:
    made = plan(offload=False)
    each = FP8_ROW + FP8_KEY + 5
    left = 141 * GIB - made.nbytes("weights") - made.nbytes("workspace")
    assert made.device_slots == made.host_slots == left // each // 64 * 64
    assert made.nbytes("host pool") == 0
    assert made.nbytes("metadata") == 5 * made.host_slots
    assert made.max_running == 64
    assert plan(offload=False, device_pool_tokens=200_000).host_slots == 200_000
    assert plan().host_slots > 2 * made.host_slots  # what offloading is for


REFUSALS = {
    "weights": ({"weights_gib": 140}, CapacityError, r"weights 140\.00 GiB.*141\.00 GiB"),
    "host memory": ({"host_pool_gib": 2000.0}, CapacityError, r"--host-pool-gib 2000.*1024\.00"),
    "one request": (
        {"host_pool_gib": 4.0},
        CapacityError,
        r"163840 needs 163840 host slots.*107328.*--host-pool-gib.*--max-model-len",
    ),
    "index keys": (
        {"host_pool_gib": 700.0},
        CapacityError,
        r"index keys.*\d GiB of HBM.*141\.00 GiB.*--host-pool-gib",
    ),
    "no room for a device pool": (
        {"host_pool_gib": 189.8},
        CapacityError,
        r"device pool has \d+ slots.*2 x index_topk = 4096.*--device-pool-tokens",
    ),
    "small device pool": (
        {"device_pool_tokens": 4095},
        CapacityError,
        r"4095 slots.*4096.*--device-pool-tokens",
    ),
    "large device pool": (
        {"device_pool_tokens": 2_000_000, "host_pool_gib": 64.0},
        CapacityError,
        r"--device-pool-tokens 2000000 takes 7\d\.\d\d GiB.*leave 2\d\.\d\d GiB",
    ),
    "host pool without offload": (
        {"offload": False, "host_pool_gib": 3.0},
        ConfigError,
        r"--host-pool-gib 3\.0 contradicts --no-offload",
    ),
    "too much without offload": (
        {"offload": False, "device_pool_tokens": 2_000_000},
        CapacityError,
        r"--device-pool-tokens 2000000 without offload.*GiB",
    ),
    "one request without offload": (
        {"offload": False, "device_pool_tokens": 100_000},
        CapacityError,
        r"163840 needs 163840 slots.*99968.*--device-pool-tokens",
    ),
    "little host memory": (
        {"device_gib": None, "host_gib": 4.0, "weights_gib": 0},
        CapacityError,
        r"163840 host slots.*--host-pool-gib",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_numbers_and_the_flag(name: str) -> None:
    arguments, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        plan(**arguments)


def test_verify() -> None:
    made = plan(host_pool_gib=64.0, device_pool_tokens=200_000)
    exact = {line.name: line.nbytes for line in made.lines}
    made.verify(exact)
    made.verify({"workspace": 5})  # an upper bound
    for name, nbytes in (
        ("device pool", exact["device pool"] - 1),
        ("index keys", exact["index keys"] + 1),
        ("workspace", exact["workspace"] + 1),
    ):
        with pytest.raises(CapacityError, match=f"{nbytes} bytes.*{name}.*{exact[name]}"):
            made.verify({name: nbytes})
    with pytest.raises(CapacityError, match="'graphs', which the plan doesn't have"):
        made.verify({"graphs": 1})


def test_the_table_shows_every_line_and_the_concurrency() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan(host_pool_gib=64.0, device_pool_tokens=200_000).render())
    text = console.export_text()
    for part in ("weights", "device pool", "index keys", "metadata", "workspace", "host pool"):
        assert part in text
    assert "200,000" in text
    assert "1,717,248" in text
    assert "of 141.000 GiB" in text
    assert "10 requests of 163840 tokens" in text
