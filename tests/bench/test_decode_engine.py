"""Engines of decode benchmarks that lie in the same host memory, one after another."""

from pathlib import Path

import torch

from echokv.bench.decode import run_all
from echokv.bench.decode_engine import DecodeEngine, LoadedModel, PoolSizes, SharedRows
from echokv.bench.decode_preset import preset_config
from echokv.config import EngineConfig


def test_shared_rows_are_rows_to_pools_of_any_size(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), kv_cache_dtype="fp8_ds_mla", device="cpu", seed=1)
    loaded = LoadedModel.make(preset_config("small", num_layers=2), tmp_path, config)
    shared = SharedRows(loaded, 768)
    for batch, tokens in ((3, 768), (2, 512)):
        sizes = PoolSizes(
            offload=True, batch=batch, max_model_len=212, host_tokens=tokens, device_tokens=400
        )
        decode = DecodeEngine(loaded, sizes, None, shared)
        host = decode.engine.host_pool
        assert host is not None and host.rows.data_ptr() == shared.memory.data_ptr()
        values = loaded.kernels.decode_rows(
            host.rows.flatten(0, 1), loaded.row_format, torch.float32
        )
        assert values.isfinite().all() and abs(float(values.std()) - 1) < 0.02
        measured = run_all(decode, [200] * batch, 3)
        assert measured["output_tokens"] == 3 * batch and measured["most_running"] == batch
        decode.close()
    shared.close()
    assert shared.memory.numel() == 0


def test_a_resident_engine_fills_rows_of_its_own(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), device="cpu", seed=1)
    loaded = LoadedModel.make(preset_config("small", num_layers=2), tmp_path, config)
    shared = SharedRows(loaded, 256)
    sizes = PoolSizes(offload=False, batch=1, max_model_len=212, host_tokens=256, device_tokens=256)
    decode = DecodeEngine(loaded, sizes, None, shared)
    assert decode.engine.cache.rows(1).any(dim=1).all()
    decode.close()
    shared.close()
