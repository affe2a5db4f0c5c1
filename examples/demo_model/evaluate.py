"""Exact match on held-out tasks, and loss on held-out library text.

An answer counts when every one of its tokens is the most likely one given the prompt and the
answer so far: what greedy decoding would give, in one pass.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from examples.demo_model.data import Question
from examples.demo_model.model import DemoModel

LENGTH_STEP = 256
"""Passes are padded to a multiple."""


@torch.no_grad()
def exact_match(
    model: DemoModel, questions: Sequence[Question], *, sparse: bool, batch_tokens: int
) -> dict[str, float]:
    """Share of right answers by "task/target"."""
    right: dict[str, list[bool]] = defaultdict(list)
    ordered = sorted(questions, key=lambda q: len(q.prompt) + len(q.answer))
    while ordered:
        longest = len(ordered[-1].prompt) + len(ordered[-1].answer)
        length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        count = max(1, batch_tokens // length)
        group, ordered = ordered[-count:], ordered[:-count]
        for question, correct in zip(group, _correct(model, group, length, sparse), strict=True):
            right[f"{question.task}/{question.target}"].append(correct)
    return {name: sum(hits) / len(hits) for name, hits in sorted(right.items())}


def _correct(
    model: DemoModel, questions: Sequence[Question], length: int, sparse: bool
) -> list[bool]:
    tokens = np.zeros((len(questions), length), dtype=np.int64)
    rows: list[int] = []
    wanted: list[int] = []
    owners: list[int] = []
    for number, question in enumerate(questions):
        whole = question.prompt + question.answer
        tokens[number, : len(whole)] = whole
        first = number * length + len(question.prompt) - 1
        rows += range(first, first + len(question.answer))
        wanted += question.answer
        owners += [number] * len(question.answer)
    device = model.norm.weight.device
    hidden, _ = model(torch.from_numpy(tokens).to(device), sparse=sparse)
    best = model.logits(hidden[torch.tensor(rows, device=device)]).argmax(-1).tolist()
    wrong = {o for o, got, want in zip(owners, best, wanted, strict=True) if got != want}
    return [number not in wrong for number in range(len(questions))]


@torch.no_grad()
def text_loss(
    model: DemoModel, library: np.ndarray, bos: int, *, sparse: bool, sequences: int, length: int
) -> float:
    """Nats a token on held-out text, spread over all of it."""
    starts = np.linspace(0, len(library) - length - 1, sequences).astype(int)
    device, total = model.norm.weight.device, 0.0
    for start in starts:
        ids = torch.from_numpy(library[start : start + length].astype(np.int64)).to(device)
        tokens: Tensor = torch.cat((ids.new_tensor([bos]), ids[:-1]))[None]
        hidden, _ = model(tokens, sparse=sparse)
        total += model.losses(hidden, ids).mean().item()
    return total / sequences
