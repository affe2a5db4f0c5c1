"""`bench quality`: offloaded rows equal the resident row, and a difference is not overlooked."""

import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from echokv.bench import quality
from echokv.bench.quality import Answers, run_quality
from echokv.bench.quality_report import plot_quality, render_quality, render_tasks
from echokv.bench.quality_tasks import Instance, document_instances, task_instances
from echokv.config import EngineConfig
from echokv.engine.tokenizer import Tokenizer
from echokv.errors import ConfigError


def instance(task: str, length: str, tokens: int) -> Instance:
    return Instance(
        task=task,
        length=length,
        prompt_token_ids=tuple(range(tokens)),
        answer="right",
        max_tokens=5,
    )


INSTANCES = [instance("a", "160", 160), instance("b", "160", 150), instance("a", "240", 240)]


def test_a_small_run(small_model: Path, tmp_path: Path) -> None:
    pools = [Fraction(1, 2), Fraction(1, 16)]
    config = EngineConfig(model=str(small_model), host_pool_gib=0.1)  # of the offloaded ones
    result = run_quality(config, INSTANCES, pools)
    assert result["lossless"] is True
    assert result["tasks"] == ["a", "b"]
    first, second = result["groups"]
    assert (first["length"], first["num_instances"], first["longest_context"]) == ("160", 2, 165)
    names = [row["variant"] for row in first["rows"]]
    assert names == [
        "everything resident",
        "offloaded, pool 1/2",
        "offloaded, pool 1/16",
        "infinigen-like",
        "freekv-like",
        "clo-like",
    ]
    assert [row["device_slots"] for row in second["rows"][1:3]] == [128, 128]  # 2 x index_topk
    for group in result["groups"]:
        for row in group["rows"]:
            if row["kind"] == "offloaded":
                assert row["identical"] == row["total"] and row["hit_rate"] < 1
            assert (row["overlap"] is not None) == (row["kind"] == "lossy")
    table = render_quality(result).splitlines()
    assert table[0].startswith("| variant | 160 | 240 |") and len(table) == 8
    assert "| 3/3 |" in table[3]
    assert len(render_tasks(result).splitlines()) == 2 + 2 * 4
    assert plot_quality(result, tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(result)


def test_workers_give_the_same_answers(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, pools = EngineConfig(model=str(small_model)), [Fraction(1, 4)]
    monkeypatch.setattr(quality, "_QUESTIONS_A_JOB", 1)
    lengths: list[int] = []
    alone, shared = (
        run_quality(
            config,
            INSTANCES,
            pools,
            ["clo-like"],
            workers=count,
            on_group=lambda result: lengths.append(len(result["groups"])),
        )
        for count in (1, 2)
    )
    assert shared == alone
    assert lengths == [1, 2, 1, 2]  # what was known after each group


def test_one_other_token_is_a_failure(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(job: quality._Job) -> Answers:
        tokens = [(1, 2, 3)] * len(job.questions)
        if job.variant.fraction == Fraction(1, 4) and len(job.questions) == 1:
            tokens = [(1, 2, 4)]
        return Answers(tokens=tokens, texts=[" right\n"] * len(job.questions))

    monkeypatch.setattr(quality, "ask", ask)
    pools = [Fraction(1, 2), Fraction(1, 4)]
    result = run_quality(EngineConfig(model=str(small_model)), INSTANCES, pools, [])
    assert result["lossless"] is False
    rows: list[dict[str, Any]] = result["groups"][1]["rows"]
    assert [row["identical"] for row in rows] == [1, 1, 0]
    assert [row["exact_match"] for row in rows] == [1, 1, 1]


def test_instances_fit_their_length(small_model: Path) -> None:
    tokenizer = Tokenizer.from_dir(str(small_model))
    made = task_instances(["passkey", "kv_names"], [1000, 1500], 2, tokenizer)
    assert [(one.task, one.length) for one in made[::2]] == [
        ("passkey", "1000"),
        ("kv_names", "1000"),
        ("passkey", "1500"),
        ("kv_names", "1500"),
    ]
    assert len({one.prompt_token_ids for one in made}) == 8
    for one in made:
        assert int(one.length) - 500 < len(one.prompt_token_ids) <= int(one.length) + 8
        assert one.answer in tokenizer.decode(list(one.prompt_token_ids))
        assert one.max_tokens > len(one.answer)


def test_documents_of_lost_in_the_middle(small_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(str(small_model))
    record = {"key": "k2", "value": "v2", "ordered_kv_records": [["k1", "v1"], ["k2", "v2"]]}
    file = tmp_path / "kv-retrieval-2_keys.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.write(f"{json.dumps(record)}\n" * 3)
    made = document_instances(file, 2, tokenizer)
    assert len(made) == 2 and made[0].answer == "v2"
    assert made[0].length == "kv-retrieval-2_keys"
    assert '"k1": "v1"' in tokenizer.decode(list(made[0].prompt_token_ids))
    with pytest.raises(ConfigError, match="cannot read"):
        document_instances(tmp_path / "missing.jsonl.gz", 2, tokenizer)
    with gzip.open(file, "wt") as out:
        out.write("{}\n")
    with pytest.raises(ConfigError, match="not a key-value retrieval file"):
        document_instances(file, 2, tokenizer)
