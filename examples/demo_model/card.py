"""The model card: `model_card.md` with a run's numbers filled in."""

import csv
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from echokv.bench.markdown import table
from examples.demo_model.recipe import Preset

TEMPLATE = Path(__file__).parent / "model_card.md"


def model_card(run: Path, preset: Preset, parameters: int) -> str:
    """Text of the card.

    Args:
        run: folder with train.csv and eval.jsonl of a finished run.
        preset: what it trained.
        parameters: of the model.
    """
    evaluations = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    last, s = evaluations[-1], preset.shapes
    return TEMPLATE.read_text().format(
        parameters=f"{parameters / 1e6:.1f}M",
        megabytes=f"{2e-6 * parameters:.1f}",
        layers=s.num_hidden_layers,
        experts=s.n_routed_experts,
        active=s.num_experts_per_tok,
        heads=s.num_attention_heads,
        q_lora=s.q_lora_rank,
        kv_lora=s.kv_lora_rank,
        rope=s.qk_rope_head_dim,
        index_heads=s.index_n_heads,
        index_dim=s.index_head_dim,
        topk=s.index_topk,
        vocab=s.vocab_size,
        recipe=_recipe(run, preset, evaluations),
        text_loss=f"{last['held_out_text_loss']:.2f}",
        count=last.get("instances", 32),
        accuracy=_accuracy(last["exact_match"]),
    )


def _recipe(run: Path, preset: Preset, evaluations: list[dict[str, Any]]) -> str:
    """A row a phase: steps, tokens and the last losses that were logged."""
    with (run / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = {name: list(group)[-1] for name, group in groupby(rows, key=lambda row: row["phase"])}
    lines, before = [], 0
    for evaluation in evaluations:
        steps, row = evaluation["step"] - before, last[evaluation["after"]]
        before = evaluation["step"]
        losses = (
            None if row[key] == "nan" else f"{float(row[key]):.3f}"
            for key in ("text_loss", "answer_loss", "index_kl")
        )
        tokens = steps * preset.batch_tokens / 1e6
        lines.append([evaluation["after"], f"{steps:,}", f"{tokens:.1f}M", *losses])
    header = ("phase", "steps", "tokens", "text loss", "answer loss", "indexer KL")
    return table(header, lines)


def _accuracy(exact_match: dict[str, float]) -> str:
    """A row a task, a column a length."""
    tasks = sorted({name.partition("/")[0] for name in exact_match})
    lengths = sorted({int(name.partition("/")[2]) for name in exact_match})
    lines = [
        [f"`{task}`", *(f"{exact_match[f'{task}/{length}']:.2f}" for length in lengths)]
        for task in tasks
    ]
    return table(("task", *(f"{n:,}" for n in lengths)), lines)
