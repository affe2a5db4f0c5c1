"""What --prefetch auto and --host-memory come to."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from echokv.config import EngineConfig, ModelConfig
from echokv.engine import resolve
from echokv.engine.resolve import moves_rows_while_scoring
from echokv.errors import ConfigError

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"backend": "triton"}, False),
        ({"index_key_dtype": "bfloat16"}, False),
        ({"indexer_kernel": "deepgemm"}, False),
        ({"indexer_kernel": "backend"}, True),
        ({"index_n_heads": 64}, True),
        ({"index_n_heads": 16}, False),
        ({"index_head_dim": 64}, False),
    ],
)
def test_where_rows_can_move_while_scores_are_made(changes: dict[str, Any], expected: bool) -> None:
    said = {"backend": "cuda", "index_key_dtype": "fp8", "indexer_kernel": "auto"} | changes
    config = EngineConfig(model=str(CHECKPOINT), indexer_kernel=said["indexer_kernel"])
    sizes = {name: changes[name] for name in ("index_n_heads", "index_head_dim") if name in changes}
    model = dataclasses.replace(ModelConfig.from_dir(CHECKPOINT), **sizes)
    found = moves_rows_while_scoring(config, model, said["backend"], said["index_key_dtype"])
    assert found == expected


@pytest.mark.parametrize(
    ("said", "offload", "pays", "expected"),
    [
        ("auto", True, True, "decode"),
        ("auto", True, False, "off"),
        ("auto", False, True, "off"),
        ("on", True, False, "on"),
        ("decode", True, False, "decode"),
        ("off", True, True, "off"),
    ],
)
def test_prefetch_auto_is_decode_where_it_pays(
    said: str, offload: bool, pays: bool, expected: str
) -> None:
    config = EngineConfig(model=str(CHECKPOINT), prefetch=said, offload=offload)
    assert resolve._prefetch(config, pays) == expected


def host_memory(device: str, **changes: Any) -> str:
    return resolve._host_memory(EngineConfig(model=str(CHECKPOINT), **changes), device)


def test_host_memory_is_decided_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "host_memory_kind", lambda kind, device: f"{kind} on {device}")
    assert host_memory("cuda") == "auto on cuda"
    assert host_memory("cuda", host_memory="pinned") == "pinned on cuda"
    assert host_memory("cpu", host_memory="pinned") == "pinned"
    assert host_memory("cuda", offload=False) == "auto"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_memory": "hbm"}, "--host-memory 'hbm' is not one of auto, managed, pinned"),
        ({"host_memory": "pinned", "offload": False}, "--host-memory pinned contradicts"),
    ],
)
def test_host_memory_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=message):
            host_memory(device, **changes)
