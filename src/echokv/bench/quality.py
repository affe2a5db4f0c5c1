"""What losslessness buys: the same questions, with every row resident, offloaded, and guessed.

One request at a time, greedy, no prefix cache, so that all variants compute the same passes. The
offloaded variants must give the resident variant's tokens, every one of them.
"""

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from echokv.bench.lossy import LOSSY, LossySelector
from echokv.bench.quality_tasks import Instance
from echokv.config import EngineConfig, ModelConfig
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.offline import drive
from echokv.engine.sampling_params import SamplingParams
from echokv.indexer.indexer import Indexer
from echokv.log import progress
from echokv.memory.slots import BLOCK_TOKENS
from echokv.models.deepseek_v32 import DeepseekV32


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the model: resident, offloaded with some pool, or lossy and resident."""

    name: str
    fraction: Fraction | None = None  # device pool over the group's longest context
    lossy: str | None = None  # of LOSSY

    @property
    def kind(self) -> str:
        """resident, offloaded or lossy."""
        return "lossy" if self.lossy else "offloaded" if self.fraction else "resident"


@dataclass
class Answers:
    """What one variant answered in one group."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    device_slots: int = 0
    hit_rate: float = 1.0
    overlap: float | None = None  # lossy: share of the exact selections that the guesses had


def variants(fractions: Sequence[Fraction], lossy: Sequence[str]) -> list[Variant]:
    """The resident one, which comes first, and those compared with it."""
    return [
        Variant(name="everything resident"),
        *(Variant(name=f"offloaded, pool {one}", fraction=one) for one in fractions),
        *(Variant(name=one, lossy=one) for one in lossy),
    ]


def run_quality(
    config: EngineConfig,
    instances: Sequence[Instance],
    fractions: Sequence[Fraction],
    lossy: Sequence[str] = tuple(LOSSY),
    *,
    workers: int = 1,
) -> dict[str, Any]:
    """Ask every instance of every variant, ready for JSON.

    A pool below 2 x index_topk slots, the least an engine runs with, is raised to that;
    `device_slots` says what was used.

    Args:
        config: the engine; pools, lengths and the batch are set here.
        instances: grouped by their `length`, in order of first appearance.
        fractions: device pools, as shares of the longest context of a group.
        lossy: names of LOSSY.
        workers: processes that share the groups and variants; each loads the model.

    Returns:
        `groups`, each with `rows`, one a variant; `lossless`: whether every offloaded row has
        exactly the resident row's tokens.
    """
    groups: dict[str, list[Instance]] = {}
    for instance in instances:
        groups.setdefault(instance.length, []).append(instance)
    chosen = variants(fractions, lossy)
    jobs = [(group, variant) for group in groups.values() for variant in chosen]
    asked = _ask_all(config, jobs, workers)
    answers = list(progress(asked, total=len(jobs), what="quality", unit="run"))
    results: list[dict[str, Any]] = []
    for place, (length, group) in enumerate(groups.items()):
        mine = answers[place * len(chosen) : (place + 1) * len(chosen)]
        results.append(
            {
                "length": length,
                "longest_context": max(one.total_tokens for one in group),
                "num_instances": len(group),
                "rows": [
                    _row(group, variant, one, mine[0])
                    for variant, one in zip(chosen, mine, strict=True)
                ],
            }
        )
    offloaded = [r for g in results for r in g["rows"] if r["kind"] == "offloaded"]
    return {
        "tasks": sorted({one.task for one in instances}),
        "groups": results,
        "lossless": all(row["identical"] == row["total"] for row in offloaded),
    }


def _ask_all(
    config: EngineConfig, jobs: Sequence[tuple[list[Instance], Variant]], workers: int
) -> Iterator[Answers]:
    if workers == 1:
        yield from (ask(config, group, variant) for group, variant in jobs)
        return
    groups, chosen = zip(*jobs, strict=True)
    context = multiprocessing.get_context("spawn")  # a forked process can't use CUDA
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(ask, [config] * len(jobs), groups, chosen)


def ask(config: EngineConfig, group: Sequence[Instance], variant: Variant) -> Answers:
    """Run one group through one variant."""
    selectors: list[LossySelector] = []
    engine = Engine(
        _config(config, group, variant),
        hooks=EngineHooks(selector=_selector(variant, selectors) if variant.lossy else None),
    )
    answers = Answers(
        tokens=[()] * len(group), texts=[""] * len(group), device_slots=engine.cache.capacity
    )
    jobs = [
        (one.prompt_token_ids, SamplingParams(temperature=0, max_tokens=one.max_tokens))
        for one in group
    ]
    try:
        for index, output in drive(engine, jobs, name="quality"):
            answers.tokens[index] += output.token_ids
            answers.texts[index] += output.text
        layers = engine.stats().layers
    finally:
        engine.close()
    selected = sum(layer.selected_rows for layer in layers)
    recalled = sum(layer.recalled_rows for layer in layers)
    answers.hit_rate = 1.0 - recalled / selected if selected else 1.0
    for selector in selectors:
        answers.overlap = selector.found / selector.wanted if selector.wanted else None
    return answers


def _selector(
    variant: Variant, made: list[LossySelector]
) -> Callable[[DeepseekV32, Indexer], LossySelector]:
    def make(model: DeepseekV32, exact: Indexer) -> LossySelector:
        assert variant.lossy is not None
        made.append(LOSSY[variant.lossy](model, exact))
        return made[-1]

    return make


def _config(config: EngineConfig, group: Sequence[Instance], variant: Variant) -> EngineConfig:
    context = max(one.total_tokens for one in group)
    if variant.fraction is None:
        slots = (context // BLOCK_TOKENS + 2) * BLOCK_TOKENS
    else:
        smallest = 2 * ModelConfig.from_dir(config.model).index_topk
        slots = max(smallest, int(context * variant.fraction))
    return dataclasses.replace(
        config,
        offload=variant.fraction is not None,
        device_pool_tokens=slots,
        max_model_len=context + 1,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,  # lossy selectors keep state in Python
    )


def _row(
    group: Sequence[Instance], variant: Variant, answers: Answers, resident: Answers
) -> dict[str, Any]:
    right = [text.strip() == one.answer for text, one in zip(answers.texts, group, strict=True)]
    same = [mine == its for mine, its in zip(answers.tokens, resident.tokens, strict=True)]
    by_task = {
        task: [ok for ok, one in zip(right, group, strict=True) if one.task == task]
        for task in dict.fromkeys(one.task for one in group)
    }
    return {
        "variant": variant.name,
        "kind": variant.kind,
        "device_slots": answers.device_slots,
        "total": len(group),
        "correct": sum(right),
        "exact_match": sum(right) / len(group),
        "exact_match_by_task": {task: sum(ok) / len(ok) for task, ok in by_task.items()},
        "identical": sum(same),
        "hit_rate": answers.hit_rate if variant.kind == "offloaded" else None,
        "overlap": answers.overlap,
        "outputs": answers.texts,
    }
