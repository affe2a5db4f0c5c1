"""The training loop: phases within a budget of time, state and logs in the run's folder."""

import csv
import json
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echokv.bench.tasks import TASKS
from echokv.models.byte_tokenizer import BOS
from examples.demo_model.data import (
    ANSWER,
    TEXT,
    Loader,
    Question,
    SequenceMaker,
    held_out_questions,
    load_tokenizer,
)
from examples.demo_model.evaluate import exact_match, text_loss
from examples.demo_model.indexing import IndexerLoss
from examples.demo_model.model import DemoModel, Extras
from examples.demo_model.optimizers import Optimizers
from examples.demo_model.recipe import Phase, Preset

TEXT_LOSS_WEIGHT = 0.5
BALANCE_SPEED = 1e-3
WARM_UP_STEPS = 40
LOG_EVERY = 20
QUICK_COUNT = 8
"""Instances of a task and length in evaluations between phases."""


class Log:
    """train.csv of steps and eval.jsonl of evaluations, appended and echoed."""

    def __init__(self, run: Path) -> None:
        self._csv = (run / "train.csv").open("a", newline="")
        self._writer = csv.writer(self._csv)
        self._evals = (run / "eval.jsonl").open("a")
        if not self._csv.tell():
            self._writer.writerow(
                "step phase seconds text_loss answer_loss answer_accuracy index_kl scale".split()
            )

    def step(self, *values: Any) -> None:
        """One row."""
        row = [f"{v:.4f}" if isinstance(v, float) else v for v in values]
        self._writer.writerow(row)
        self._csv.flush()
        print(*row, flush=True)

    def evaluation(self, record: dict[str, Any]) -> None:
        """One line of JSON."""
        print(json.dumps(record), flush=True)
        self._evals.write(json.dumps(record) + "\n")
        self._evals.flush()


class Trainer:
    """Runs the phases.

    Args:
        preset: sizes.
        run: folder with what `prepare` made; state and logs go there.
        seconds: the whole recipe's budget.
        stop_after: seconds of this call, then save and return.
        device: where.
        eval_count: held-out instances of each task and length at the end.
        workers: data processes a phase.
    """

    def __init__(
        self,
        preset: Preset,
        run: Path,
        *,
        seconds: float,
        stop_after: float,
        device: torch.device,
        eval_count: int,
        workers: int,
    ) -> None:
        self._deadline = time.monotonic() + stop_after
        self._preset, self._run, self._seconds, self._device = preset, run, seconds, device
        self._phase, self._step, self._spent, self._phase_first = 0, 0, 0.0, 0
        saved: dict[str, Any] | None = None
        if (run / "state.pt").exists():
            saved = torch.load(run / "state.pt", map_location="cpu", weights_only=True)
            self._phase, self._step = saved["phase"], saved["step"]
            self._spent = saved["spent"]
        tokenizer = load_tokenizer(run)
        self._bos = tokenizer.token_to_id(BOS)
        self._held_out = np.load(run / "library-held-out.npy")
        library = np.load(run / "library-train.npy")
        self._loaders = {
            phase.name: Loader(
                SequenceMaker(tokenizer, library, phase.text),
                preset.batch_tokens // phase.length,
                phase.length,
                seed=phase.name,
                first=self._step,
                workers=workers,
            )
            for phase in preset.phases[self._phase :]
        }
        self._pool = ProcessPoolExecutor(max(1, workers // 2), mp_context=get_context("fork"))
        self._questions: dict[int, list[Future[list[Question]]]] = {
            length: [
                self._pool.submit(held_out_questions, tokenizer, (task,), length, eval_count)
                for task in TASKS
            ]
            for length in preset.eval_lengths
        }
        self._eval_count = eval_count
        self._log = Log(run)
        cuda = device.type == "cuda"
        torch.manual_seed(0)
        self.model = DemoModel(
            preset.shapes, tokens_compiled=preset.batch_tokens if cuda else 0
        ).to(device)
        self._optimizers = Optimizers(
            self.model,
            muon_lr=preset.muon_lr,
            adam_lr=preset.adam_lr,
            index_lr=preset.index_lr,
        )
        if saved is not None:
            self.model.load_state_dict({k: v.float() for k, v in saved["model"].items()})
            self._optimizers.load_state_dict(saved["optimizers"])
            print(f"goes on at step {self._step}, phase {self._phase}", flush=True)
        size = sum(p.numel() for p in self.model.parameters())
        print(f"{size:,} parameters, {2e-6 * size:.2f} MB in bfloat16", flush=True)

    def train(self) -> bool:
        """Run until the recipe ends (True) or this call's time does (False); saves either way."""
        while self._phase < len(self._preset.phases):
            phase = self._preset.phases[self._phase]
            finished = self._train_phase(phase)
            if not finished:
                self.save()
                return False
            self._phase, self._spent = self._phase + 1, 0.0
            self._loaders[phase.name].stop()
            self.save()
            self.evaluate(phase, quick=self._phase < len(self._preset.phases))
        return True

    def _train_phase(self, phase: Phase) -> bool:
        budget = phase.share * self._seconds
        self._phase_first = self._step
        started, before = time.monotonic(), self._spent
        while True:
            now = time.monotonic()
            self._spent = before + now - started
            if self._spent >= budget:
                return True
            if now >= self._deadline:
                return False
            part = self._spent / budget
            scale = phase.scale[0] + part * (phase.scale[1] - phase.scale[0])
            self._one_step(phase, scale * min(1.0, (self._step + 1) / WARM_UP_STEPS))
            self._step += 1

    def _one_step(self, phase: Phase, scale: float) -> None:
        batch = self._loaders[phase.name].next()
        tokens = torch.from_numpy(batch.tokens.astype(np.int64)).to(self._device)
        kinds = torch.from_numpy(batch.kinds).to(self._device)
        inputs, targets, kinds = tokens[:, :-1], tokens[:, 1:].flatten(), kinds[:, 1:]
        index_loss = None
        if phase.kind != "dense":
            index_loss = IndexerLoss.sample(kinds == ANSWER, self._preset.index_queries)
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda"):
            if phase.kind == "indexer":
                with torch.no_grad():
                    _, extras = self.model(inputs, index_loss=index_loss, index_only=True)
                losses = None
            else:
                hidden, extras = self.model(
                    inputs, sparse=phase.kind == "sparse", index_loss=index_loss
                )
                losses = self.model.losses(hidden, targets)
        if losses is not None:
            self._learn(losses, kinds.flatten(), extras)
        self._optimizers.step(scale, main=losses is not None, index=index_loss is not None)
        if self._step % LOG_EVERY == 0:
            self._report(phase, losses, kinds.flatten(), extras, scale)

    def _learn(self, losses: Tensor, kinds: Tensor, extras: Extras) -> None:
        text, answer = (_mean_where(losses, kinds == kind) for kind in (TEXT, ANSWER))
        total = TEXT_LOSS_WEIGHT * text + answer
        for loss in extras.index_losses:
            total = total + loss
        total.backward()
        self.model.balance(extras.loads, BALANCE_SPEED)

    def _report(
        self, phase: Phase, losses: Tensor | None, kinds: Tensor, extras: Extras, scale: float
    ) -> None:
        row = [float("nan")] * 3
        if losses is not None:
            answers = kinds == ANSWER
            row = [
                _mean_where(losses, kinds == TEXT).item(),
                _mean_where(losses, answers).item(),
                _mean_where((losses < 0.6931).float(), answers).item(),
            ]
        kl = float("nan")
        if extras.index_losses:
            kl = torch.stack(extras.index_losses).mean().item()
        self._log.step(self._step, phase.name, self._spent, *row, kl, scale)

    def evaluate(self, phase: Phase, *, quick: bool) -> None:
        """Accuracy by task and length, few instances when quick; dense in dense phases."""
        sparse, started = phase.kind != "dense", time.monotonic()
        lengths = [n for n in self._preset.eval_lengths if not quick or n <= 1.2 * phase.length]
        if quick:
            lengths = lengths[-2:]
        accuracy: dict[str, float] = {}
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda"):
            for length in lengths:
                questions = [
                    question
                    for future in self._questions[length]
                    for question in future.result()[: QUICK_COUNT if quick else None]
                ]
                accuracy |= exact_match(
                    self.model,
                    questions,
                    sparse=sparse,
                    batch_tokens=self._preset.batch_tokens // 2,
                )
            loss = text_loss(
                self.model,
                self._held_out,
                self._bos,
                sparse=sparse,
                sequences=16,
                length=min(2048, max(self._preset.eval_lengths)),
            )
        self._log.evaluation(
            {
                "after": phase.name,
                "step": self._step,
                "steps_of_this_call": self._step - self._phase_first,
                "sparse": sparse,
                "held_out_text_loss": round(loss, 4),
                "instances": QUICK_COUNT if quick else self._eval_count,
                "exact_match": accuracy,
                "seconds": round(time.monotonic() - started, 1),
            }
        )

    def save(self) -> None:
        """Weights and optimizer, in bfloat16 to be small, and where the recipe stands."""
        state = {
            "model": {k: v.bfloat16() for k, v in self.model.state_dict().items()},
            "optimizers": _halved(self._optimizers.state_dict()),
            "phase": self._phase,
            "step": self._step,
            "spent": self._spent,
        }
        torch.save(state, self._run / "state.tmp")
        (self._run / "state.tmp").rename(self._run / "state.pt")

    def close(self) -> None:
        """End the data processes."""
        for loader in self._loaders.values():
            loader.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp_min(1)


def _halved(state: Any) -> Any:
    """Every float tensor of a nested state in bfloat16, scalars as they are."""
    if isinstance(state, Tensor):
        return state.bfloat16() if state.is_floating_point() and state.dim() else state
    if isinstance(state, dict):
        return {key: _halved(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_halved(value) for value in state]
    return state
