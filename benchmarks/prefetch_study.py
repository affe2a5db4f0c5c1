"""What predictions would prefetch, on real selections: rows that are absent and beat a threshold.

    python benchmarks/prefetch_study.py record build/wide-tasks.npz --what tasks  # minutes of CPU
    python benchmarks/prefetch_study.py record build/wide-text.npz --what text
    python benchmarks/prefetch_study.py study build/wide-tasks.npz build/wide-text.npz --out FILE

`record` runs the demo model, four requests at once, and keeps for each decode step and layer the
host slots of the 4k best scores, and those scores. `study` replays them through a pool that evicts
by recency, then by score, of the size that gives a hit rate, and asks of each way to predict the
k-th score: which absent rows would have beaten it, and which of them were selected: all of them;
within a "budget" of an eighth of k, at random, as the first that are found are; and within "limits"
that are learnt as the product's are. All but the first 20 steps count.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from echokv.bench.around_indexer import AroundIndexer
from echokv.bench.filler import filler_lines
from echokv.bench.quality_tasks import task_instances
from echokv.bench.report import environment, write_json
from echokv.cache.batch import ForwardBatch
from echokv.config import EngineConfig
from echokv.engine.build import EngineHooks
from echokv.engine.engine import Engine
from echokv.engine.offline import drive
from echokv.engine.sampling_params import SamplingParams
from echokv.indexer.indexer import Indexer, Selection
from echokv.kernels.prefetch_args import PROBES, RESTS, ROWS_FOR_A_USEFUL_ONE, USEFUL_ALPHA

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

REQUESTS, OUTPUT, WARM_UP, WIDTH = 4, 64, 20, 4
TASKS = ["kv_uuid", "multi_needle", "kv_names", "variables"]
HITS = (0.97, 0.9, 0.77)
PARTS = 8  # of k, by which shares of absent rows are given
QUANTILES = 20
WAYS = ("all", "budget", "limits")
SMALLEST, LARGEST = 1024, 9000  # pools, for four requests that select 256 rows each


class WideSelector(AroundIndexer):
    """The product's indexer; of decode steps, the best 4k are kept beside."""

    def __init__(self, exact: Indexer) -> None:
        super().__init__(exact)
        self.kept: dict[int, list[tuple[Ints, Floats]]] = {}
        self._wide = exact.with_topk(WIDTH * exact.topk)

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`."""
        if batch.is_decode and batch.num_real_tokens == REQUESTS:
            wide = self._wide.select(index_layer, query, weights, batch)
            scores, order = wide.scores[:REQUESTS].sort(dim=1, descending=True)
            slots = wide.host_slots[:REQUESTS].gather(1, order)
            kept = self.kept.setdefault(index_layer, [])
            kept.append((slots.numpy().astype(np.int32), scores.numpy().astype(np.float32)))
        return self._exact.select(index_layer, query, weights, batch)


def record(model: str, what: str, out: Path) -> None:
    """Run four requests, and write [L, S, T, 4k] slots and scores."""
    found: list[WideSelector] = []

    def wrap(_model: object, exact: Indexer) -> WideSelector:
        found.append(WideSelector(exact))
        return found[0]

    config = EngineConfig(
        model=model, max_num_seqs=REQUESTS, max_model_len=6144, device_pool_tokens=6144,
        enforce_eager=True,
    )  # fmt: skip
    engine = Engine(config, hooks=EngineHooks(selector=wrap))
    if what == "tasks":
        instances = task_instances(TASKS, [4096], 1, engine.tokenizer)
        prompts = [list(one.prompt_token_ids) for one in instances]
    else:
        lines = filler_lines("held-out")
        starts = [number * len(lines) // REQUESTS for number in range(REQUESTS)]
        texts = ["".join(lines[start : start + 260]) for start in starts]
        prompts = [engine.tokenizer.encode(text) for text in texts]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for _ in drive(engine, [(prompt, params) for prompt in prompts], name="record"):
        pass
    engine.close()
    layers = [found[0].kept[layer] for layer in sorted(found[0].kept)]
    out.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: np.stack([np.stack([step[at] for step in steps]) for steps in layers])
        for at, name in enumerate(("slots", "scores"))
    }
    np.savez_compressed(out, allow_pickle=False, **arrays)
    print(f"wrote {out}: {arrays['slots'].shape[1]} steps of {len(layers)} layers")


def absences(slots: Ints, topk: int, capacity: int) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Layer, step and [T, 4k]: which rows a pool that evicts by recency and score lacks by then."""
    for layer, steps in enumerate(slots):
        used: dict[int, float] = {}  # host slot -> step of its last use, plus its score's rank
        for step, rows in enumerate(steps):
            absent = np.array([[slot not in used for slot in row] for row in rows.tolist()])
            if step >= WARM_UP:
                yield layer, step, absent & (rows >= 0)
            chosen = {
                slot: step + 1 - rank / topk
                for row in rows[:, :topk].tolist()
                for rank, slot in enumerate(row)
                if slot >= 0
            }
            used |= chosen
            leavers = sorted((slot for slot in used if slot not in chosen), key=used.__getitem__)
            for slot in leavers[: max(0, len(used) - capacity)]:
                del used[slot]


def hit_rate(slots: Ints, topk: int, capacity: int) -> float:
    """Share of the selected rows that were there."""
    return 1 - float(
        np.mean([absent[:, :topk] for _, _, absent in absences(slots, topk, capacity)])
    )


def capacity_for(slots: Ints, topk: int, hit: float) -> int:
    """The pool that gives a hit rate, about, between SMALLEST and LARGEST."""
    low, high = SMALLEST, LARGEST
    for _ in range(6):
        middle = (low + high) // 2
        low, high = (middle, high) if hit_rate(slots, topk, middle) < hit else (low, middle)
    return high


def average(alpha: float, margin: float = 0.0) -> Callable[[list[float]], float]:
    """Moving average, alpha the weight of the past; and so many times its mean absolute error."""

    def predict(past: list[float]) -> float:
        level, error = past[0], 0.0
        for score in past[1:]:
            error = 0.5 * error + 0.5 * abs(score - level)
            level = alpha * level + (1 - alpha) * score
        return level + margin * error

    return predict


PREDICTORS: dict[str, Callable[[list[float]], float]] = {
    "average, alpha 0.5": average(0.5),
    "average, alpha 0.3": average(0.3),
    "average, alpha 0.7": average(0.7),
    "the last": average(0.0),
    "average + 0.5 errors": average(0.5, 0.5),
    "average + 1 error": average(0.5, 1.0),
    "average + 2 errors": average(0.5, 2.0),
    "highest of the last 2": lambda past: max(past[-2:]),
    "highest of the last 4": lambda past: max(past[-4:]),
    "highest of the last 8": lambda past: max(past[-8:]),
}


@dataclass
class Learnt:
    """What the product would have learnt of one layer of a request."""

    useful: float | None = None  # rows a step, averaged
    vain: float = 0.0  # likewise, those that weren't selected
    limit: int | None = None  # rows that may be fetched; None: any number
    rests: int = 0  # steps without prediction that are left
    since: int = 0  # step of the first k-th score that the prediction goes by

    def rest(self, step: int) -> bool:
        """Whether it rests in a step; the k-th score of the last of these is where it goes on."""
        if self.rests == 0:
            return False
        self.rests -= 1
        self.since = step
        return True

    def learn(self, useful: int, vain: int) -> None:
        """After a step in which so many of the rows fetched were selected, and so many weren't."""
        past = 0.0 if self.useful is None else USEFUL_ALPHA
        self.useful = past * (self.useful or 0.0) + (1 - past) * useful
        self.vain = past * self.vain + (1 - past) * vain
        limit = PROBES + int(ROWS_FOR_A_USEFUL_ONE * self.useful)
        self.rests = RESTS if limit == PROBES else 0
        unlimited = self.rests == 0 and self.vain <= self.useful
        self.limit = None if unlimited else limit


def named_ranks(scores: Floats, absent: NDArray[np.bool_], threshold: float) -> NDArray[np.intp]:
    """Ranks of a request's absent rows that reach a prediction, best first."""
    return np.flatnonzero((scores >= threshold) & absent)


def judge(slots: Ints, scores: Floats, topk: int, hit: float) -> dict[str, Any]:
    """What each predictor names in the pool that gives a hit rate."""
    capacity = capacity_for(slots, topk, hit)
    rng = np.random.default_rng(1)
    by_rank, steps, misses = np.zeros(slots.shape[3]), 0, []
    named = {name: np.zeros((len(WAYS), 2)) for name in PREDICTORS}  # useful, in vain
    learnt: dict[tuple[str, int, int], Learnt] = {}  # by predictor, layer and request
    for layer, step, absent in absences(slots, topk, capacity):
        by_rank += absent.sum(axis=0)
        steps += absent.shape[0]
        misses += absent[:, :topk].sum(axis=1).tolist()
        for row in range(absent.shape[0]):
            past = scores[layer, :step, row, topk - 1].astype(float).tolist()
            for name, predict in PREDICTORS.items():
                here = (scores[layer, step, row], absent[row])
                ranks = named_ranks(*here, predict(past))
                order = rng.permutation(ranks)
                mine = learnt.setdefault((name, layer, row), Learnt())
                if mine.rest(step):
                    limited = ranks[:0]
                else:
                    limited = named_ranks(*here, predict(past[mine.since :]))
                    limited = rng.permutation(limited)[: mine.limit]
                    selected = int((limited < topk).sum())
                    mine.learn(selected, limited.size - selected)
                for at, taken in enumerate((ranks, order[: topk // 8], limited)):
                    useful = int((taken < topk).sum())
                    named[name][at] += (useful, taken.size - useful)
    missing = float(by_rank[:topk].sum())
    return {
        "capacity": capacity,
        "hit_rate": 1 - missing / (steps * topk),
        "missing_a_row": dict(
            zip(("p10", "median", "p90"), np.percentile(misses, (10, 50, 90)).tolist(), strict=True)
        ),
        "absent_by_rank": (by_rank.reshape(-1, topk // PARTS).mean(axis=1) / steps).tolist(),
        "predictors": {
            name: {
                words: {"useful_of_missing": useful / missing, "in_vain_a_useful": vain / useful}
                for words, (useful, vain) in zip(WAYS, counts.tolist(), strict=True)
            }
            for name, counts in named.items()
        },
    }


def candidates_over_k(scores: Floats, topk: int) -> list[float]:
    """Quantiles of how many rows, absent or not, reach the product's prediction, over k."""
    predict, found = PREDICTORS["average, alpha 0.5"], []
    for layer, step, row in np.ndindex(scores.shape[:3]):
        if step >= WARM_UP:
            threshold = predict(scores[layer, :step, row, topk - 1].astype(float).tolist())
            found.append(int((scores[layer, step, row] >= threshold).sum()))
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return [float(count) / topk for count in np.quantile(found, places)]


def study(paths: list[Path], out: Path, commit: str | None) -> None:
    """Write what every recording says at every hit rate, and print it."""
    report: dict[str, Any] = {"environment": environment(commit), "recordings": {}}
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            slots, scores = file["slots"], file["scores"]
        topk = slots.shape[3] // WIDTH
        one = {
            "topk": topk,
            "steps": slots.shape[1],
            "candidates_over_k": candidates_over_k(scores, topk),
            "pools": [judge(slots, scores, topk, hit) for hit in HITS],
        }
        report["recordings"][path.stem] = one
        print(path.stem, json.dumps(one, indent=1), flush=True)
        write_json(out, report)


def main() -> None:
    """Parse flags, record or study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the model")
    recording.add_argument("out", type=Path, help="npz to write")
    recording.add_argument("--what", choices=("tasks", "text"), required=True, help="prompts")
    recording.add_argument("--model", default="examples/demo_model/checkpoint", help="checkpoint")
    studying = commands.add_parser("study", help="replay what was recorded")
    studying.add_argument("recordings", type=Path, nargs="+", help="npz of `record`")
    studying.add_argument("--out", type=Path, required=True, help="JSON to write")
    studying.add_argument("--commit", help="of the code; default: the git checkout's")
    args = parser.parse_args()
    if args.command == "record":
        record(args.model, args.what, args.out)
    else:
        study(args.recordings, args.out, args.commit)


if __name__ == "__main__":
    main()
