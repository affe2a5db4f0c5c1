"""What losslessness buys: the same questions, with every row resident, offloaded, and guessed.

One request at a time, greedy, no prefix cache, so that all variants compute the same passes. The
offloaded variants must give the resident variant's tokens, every one of them.
"""

import dataclasses
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
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

_QUESTIONS_A_JOB = 4
"""Of a worker; an engine's start costs about as much as one."""


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
    """What one variant answered in one group, or in a part of it."""

    tokens: list[tuple[int, ...]]
    texts: list[str]
    device_slots: int = 0
    selected: int = 0  # rows, over all layers and steps
    recalled: int = 0  # of them
    wanted: int = 0  # lossy: rows of the exact selections
    found: int = 0  # of them, those that the guesses had

    def extend(self, more: "Answers") -> None:
        """Append what the same variant answered in the next part of the group."""
        self.tokens += more.tokens
        self.texts += more.texts
        for count in ("selected", "recalled", "wanted", "found"):
            setattr(self, count, getattr(self, count) + getattr(more, count))


@dataclass(frozen=True)
class _Job:
    """A variant's share of a group's questions."""

    config: EngineConfig
    questions: tuple[Instance, ...]
    variant: Variant


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
    on_group: Callable[[dict[str, Any]], None] | None = None,
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
        on_group: called with the result so far, after each group; this may take hours.

    Returns:
        `groups`, each with `rows`, one a variant; `lossless`: whether every offloaded row has
        exactly the resident row's tokens.
    """
    groups: dict[str, list[Instance]] = {}
    for instance in instances:
        groups.setdefault(instance.length, []).append(instance)
    chosen = variants(fractions, lossy)
    jobs = [
        [_jobs(config, group, variant, workers) for variant in chosen] for group in groups.values()
    ]
    flat = [job for group in jobs for variant in group for job in variant]
    asked = progress(_in_order(flat, workers), total=len(flat), what="quality", unit="run")
    done: list[dict[str, Any]] = []
    result = {"tasks": sorted({one.task for one in instances}), "groups": done, "lossless": True}
    for group, parts in zip(groups.values(), jobs, strict=True):
        answers = [_joined(islice(asked, len(variant))) for variant in parts]
        done.append(_group(group, chosen, answers))
        result["lossless"] = all(
            row["identical"] == row["total"]
            for one in done
            for row in one["rows"]
            if row["kind"] == "offloaded"
        )
        if on_group:
            on_group(result)
    return result


def _jobs(
    config: EngineConfig, group: Sequence[Instance], variant: Variant, workers: int
) -> list[_Job]:
    """One job; or as many as keep workers busy to the end, for requests come one at a time."""
    part = len(group) if workers == 1 else _QUESTIONS_A_JOB
    config = _config(config, group, variant)
    return [
        _Job(config, tuple(group[start : start + part]), variant)
        for start in range(0, len(group), part)
    ]


def _joined(parts: Iterable[Answers]) -> Answers:
    first, *others = parts
    for other in others:
        first.extend(other)
    return first


def _in_order(jobs: Sequence[_Job], workers: int) -> Iterator[Answers]:
    if workers == 1:
        yield from map(ask, jobs)
        return
    context = multiprocessing.get_context("spawn")  # a forked process can't use CUDA
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(ask, job) for job in jobs]
        yield from (future.result() for future in futures)


def ask(job: _Job) -> Answers:
    """Ask some questions of one variant."""
    selectors: list[LossySelector] = []
    variant, group = job.variant, job.questions
    engine = Engine(
        job.config,
        hooks=EngineHooks(selector=_selector(variant, selectors) if variant.lossy else None),
    )
    answers = Answers(
        tokens=[()] * len(group), texts=[""] * len(group), device_slots=engine.cache.capacity
    )
    prompts = [
        (one.prompt_token_ids, SamplingParams(temperature=0, max_tokens=one.max_tokens))
        for one in group
    ]
    try:
        for index, output in drive(engine, prompts, name="quality"):
            answers.tokens[index] += output.token_ids
            answers.texts[index] += output.text
        layers = engine.stats().layers
    finally:
        engine.close()
    answers.selected = sum(layer.selected_rows for layer in layers)
    answers.recalled = sum(layer.recalled_rows for layer in layers)
    answers.wanted = sum(selector.wanted for selector in selectors)
    answers.found = sum(selector.found for selector in selectors)
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
        host_pool_gib=config.host_pool_gib if variant.fraction else None,
        host_memory=config.host_memory if variant.fraction else "auto",
        device_pool_tokens=slots,
        max_model_len=context + 1,
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=variant.lossy is not None,  # its selector keeps state in Python
        async_scheduling=False,  # and must not see tokens past the end of a request
    )


def _group(
    group: Sequence[Instance], chosen: Sequence[Variant], answers: Sequence[Answers]
) -> dict[str, Any]:
    return {
        "length": group[0].length,
        "longest_context": max(one.total_tokens for one in group),
        "num_instances": len(group),
        "rows": [
            _row(group, variant, one, answers[0])
            for variant, one in zip(chosen, answers, strict=True)
        ],
    }


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
        "hit_rate": _share(answers.selected - answers.recalled, answers.selected)
        if variant.kind == "offloaded"
        else None,
        "overlap": _share(answers.found, answers.wanted) if variant.lossy else None,
        "outputs": answers.texts,
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
