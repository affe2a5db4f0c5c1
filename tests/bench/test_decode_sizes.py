"""Pools of a decode benchmark: what was asked for, and equal bytes on both sides."""

import pytest

from echokv.bench.decode_preset import preset_config
from echokv.bench.decode_sizes import TokenBytes, sizes_for_batch, sizes_for_bytes
from echokv.config import ModelConfig
from echokv.errors import ConfigError
from echokv.memory.formats import IndexKeyFormat, RowFormat

SLICE = ModelConfig.from_dict(preset_config("deepseek-v3.2-dp8-slice"))
EACH = TokenBytes.of(
    SLICE,
    RowFormat(name="fp8_ds_mla", latent_dim=512, rope_dim=64),
    IndexKeyFormat(name="fp8", head_dim=128),
)

LENGTHS = [92_879, 94_037, 81_582, 88_740, 97_009, 96_178, 100_256] * 5


def test_bytes_of_a_token() -> None:
    assert EACH.resident - 5 == 61 * (656 + 132) == 48_068
    assert EACH.host_slot == 61 * (132 + 4)
    assert EACH.device_slot == 61 * (656 + 13)


@pytest.mark.parametrize("gigabytes", [27, 19, 15, 9.6, 5.3])
def test_equal_bytes_hold_more_requests_offloaded(gigabytes: float) -> None:
    budget = int(gigabytes * 1e9)
    sides = {}
    for offload in (True, False):
        sizes = sizes_for_bytes(
            SLICE, EACH, offload=offload, hbm_bytes=budget, lengths=LENGTHS, max_host_tokens=None
        )
        assert sizes.host_tokens >= sum(LENGTHS[: sizes.batch])
        assert sizes.max_model_len == max(LENGTHS[: sizes.batch])
        if offload:
            used = sizes.host_tokens * EACH.host_slot + sizes.device_tokens * EACH.device_slot
            assert sizes.device_tokens >= (3 * sizes.batch + 1) * 2048
        else:
            used = sizes.host_tokens * EACH.resident
        assert used <= budget
        # Another request would not have fitted.
        tokens = sum(-(-length // 64) * 64 for length in LENGTHS[: sizes.batch + 1])
        needed = tokens * (EACH.host_slot if offload else EACH.resident)
        needed += (3 * (sizes.batch + 1) + 1) * 2048 * EACH.device_slot * offload
        assert needed > budget
        sides[offload] = sizes.batch
    assert sides[True] >= 3 * sides[False]


def test_the_host_limits_the_batch() -> None:
    sizes = sizes_for_bytes(
        SLICE, EACH, offload=True, hbm_bytes=27 * 10**9, lengths=[90_000] * 9,
        max_host_tokens=500_000,
    )  # fmt: skip
    assert sizes.batch == 5
    assert sizes.device_tokens > 100_000, "what is left goes to the device pool"


def test_no_more_requests_than_there_are() -> None:
    sizes = sizes_for_bytes(
        SLICE, EACH, offload=False, hbm_bytes=27 * 10**9, lengths=[90_000, 64], max_host_tokens=None
    )
    assert (sizes.batch, sizes.host_tokens, sizes.max_model_len) == (2, 90_048 + 64, 90_000)


def test_too_few_bytes() -> None:
    with pytest.raises(ConfigError, match=r"one request of 100256 tokens takes 4.82 GB without"):
        sizes_for_bytes(
            SLICE, EACH, offload=False, hbm_bytes=10**9, lengths=[100_256], max_host_tokens=None
        )


def test_pools_for_a_batch() -> None:
    def sizes(*, offload: bool, device: int | None = None, host: int | None = None) -> list[int]:
        made = sizes_for_batch(
            SLICE, offload=offload, batch=13, longest=32_800, device_tokens=device, host_tokens=host
        )
        return [made.host_tokens, made.device_tokens]

    whole = 13 * 513 * 64
    assert sizes(offload=True) == [whole, 53 * 2048]
    assert sizes(offload=True, device=200_000, host=1_800_001) == [1_800_000 // 64 * 64, 200_000]
    assert sizes(offload=False) == [whole, whole]
    assert sizes(offload=False, device=500_000, host=1) == [500_000 // 64 * 64] * 2
    with pytest.raises(ConfigError, match="--host-pool-tokens 32768 can't hold one request"):
        sizes(offload=True, host=32_768)
    with pytest.raises(ConfigError, match="--device-pool-tokens 32768 can't hold one request"):
        sizes(offload=False, device=32_768)
