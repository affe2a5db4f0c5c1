"""Training sequences: library text and task conversations, packed to a length, from seeds.

Worker processes make batches ahead of the GPU. Batch i comes from worker i mod W and is seeded by
its number, so the data don't depend on timing.
"""

import multiprocessing
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from echokv.bench.tasks import QUESTION_TOKENS, make_document, make_task
from echokv.models.byte_tokenizer import ASSISTANT, BOS, END_OF_TURN, EOS, USER

IGNORED, TEXT, ANSWER = 0, 1, 2
"""Kinds of a token as a target: no loss, language modelling, a task's answer."""

TASK_WEIGHTS = {
    "passkey": 1.0,
    "needle": 1.5,
    "multi_needle": 1.5,
    "kv_names": 3.0,
    "kv_uuid": 3.0,
    "variables": 1.5,
    "sorting": 1.0,
}
SMALLEST_TASK = 224
MOST_QUESTIONS = 24


@dataclass(frozen=True, kw_only=True)
class Batch:
    """tokens [B, T + 1] uint16 and the kind of each as a target [B, T + 1] uint8."""

    tokens: np.ndarray
    kinds: np.ndarray


class Encoder:
    """Text and conversations to tokens and kinds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {t: tokenizer.token_to_id(t) for t in (BOS, EOS, USER, ASSISTANT)}
        self._end = tokenizer.token_to_id(END_OF_TURN)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, bos not among them."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        """How many."""
        return len(self.ids(text))

    def conversation(
        self, text: str, questions: tuple[tuple[str, str], ...], *, chat: bool
    ) -> tuple[list[int], list[int]]:
        """One text and its questions: as a chat of turns, or as plain text.

        Only answers are learned: records are noise, and the filler would be memorised.

        Args:
            text: the document; ends with a newline.
            questions: (question, answer) pairs.
            chat: the chat template's form, as the tokenizer's config has it.
        """
        tokens, kinds = [self._special[BOS]], [IGNORED]

        def add(ids: list[int], kind: int) -> None:
            tokens.extend(ids)
            kinds.extend([kind] * len(ids))

        before = f"{text}\n"  # in one piece with the question, as a prompt is
        for question, answer in questions:
            if chat:
                user, assistant = self._special[USER], self._special[ASSISTANT]
                add([user, *self.ids(before + question), self._end, assistant], IGNORED)
                add([*self.ids(answer), self._end], ANSWER)
                before = ""
            else:
                add(self.ids(f"{before}{question}\nAnswer:"), IGNORED)
                add(self.ids(f" {answer}\n"), ANSWER)
                before = "\n"
        if not chat:
            add([self._special[EOS]], TEXT)
        return tokens, kinds

    def passage(self, ids: np.ndarray) -> tuple[list[int], list[int]]:
        """Library text that begins anywhere."""
        return [self._special[BOS], *ids.tolist()], [IGNORED] + [TEXT] * len(ids)

    def chat_prompt(self, prompt: str) -> list[int]:
        """One user message through the chat template, the answer to come next."""
        bos, user, assistant = (self._special[t] for t in (BOS, USER, ASSISTANT))
        return [bos, user, *self.ids(prompt), self._end, assistant]

    def chat_answer(self, answer: str) -> list[int]:
        """What the model should then say."""
        return [*self.ids(answer), self._end]


def library_tokens(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> np.ndarray:
    """All (name, text) pairs one after the other, each text after its name. [N] uint16."""
    named = [f"# {name}\n{text}\n" for name, text in texts]
    ids = [e.ids for e in tokenizer.encode_batch(named, add_special_tokens=False)]
    return np.concatenate([np.asarray(i, dtype=np.uint16) for i in ids])


class SequenceMaker:
    """Packs passages and conversations into sequences of one length.

    Args:
        tokenizer: trained.
        library: [N] uint16, training text.
        text_share: part of the documents that are passages.
    """

    def __init__(self, tokenizer: Tokenizer, library: np.ndarray, text_share: float) -> None:
        self._encoder = Encoder(tokenizer)
        self._library = library
        self._text_share = text_share

    def batch(self, sequences: int, length: int, seed: str) -> Batch:
        """`sequences` packed sequences of length + 1 tokens."""
        rng = Random(seed)
        rows = [self._sequence(length + 1, rng) for _ in range(sequences)]
        return Batch(
            tokens=np.asarray([tokens for tokens, _ in rows], dtype=np.uint16),
            kinds=np.asarray([kinds for _, kinds in rows], dtype=np.uint8),
        )

    def _sequence(self, size: int, rng: Random) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        kinds: list[int] = []
        while len(tokens) < size:
            room = size - len(tokens)
            if room < SMALLEST_TASK or rng.random() < self._text_share:
                more = self._passage(room if room < SMALLEST_TASK else self._length(room, rng), rng)
            else:
                more = self._task(self._length(room, rng), rng)
            tokens += more[0]
            kinds += more[1]
        return tokens[:size], kinds[:size]

    def _length(self, room: int, rng: Random) -> int:
        """All the room half of the time, else log-uniform below it."""
        if rng.random() < 0.5:
            return room
        return int(SMALLEST_TASK * (room / SMALLEST_TASK) ** rng.random())

    def _passage(self, length: int, rng: Random) -> tuple[list[int], list[int]]:
        start = rng.randrange(len(self._library) - length)
        return self._encoder.passage(self._library[start : start + length - 1])

    def _task(self, length: int, rng: Random) -> tuple[list[int], list[int]]:
        """A conversation of about `length` tokens: the more room, the more questions."""
        name = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()))[0]
        turn = QUESTION_TOKENS if name in ("kv_uuid", "multi_needle") else QUESTION_TOKENS // 2
        most = max(1, min(MOST_QUESTIONS, (length // 2) // turn))
        target = length - most * turn + QUESTION_TOKENS
        document = make_document(name, target, self._encoder.count, rng, questions=most)
        return self._encoder.conversation(
            document.text,
            document.questions,
            chat=rng.random() < 0.75,
        )


class Loader:
    """Batches of one phase, made ahead by worker processes; start it before CUDA is initialised.

    Args:
        maker: makes them.
        sequences: a batch.
        length: tokens a sequence, less one.
        seed: of the phase.
        first: number of the first batch.
        workers: processes.
    """

    def __init__(
        self,
        maker: SequenceMaker,
        sequences: int,
        length: int,
        *,
        seed: str,
        first: int,
        workers: int,
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._queues: list[Queue[Batch]] = [context.Queue(maxsize=3) for _ in range(workers)]
        self._next = first
        self._workers = [
            context.Process(
                target=_make_batches,
                args=(queue, maker, sequences, length, seed, first + number, workers),
                daemon=True,
            )
            for number, queue in enumerate(self._queues)
        ]
        self._first = first
        for worker in self._workers:
            worker.start()

    def next(self) -> Batch:
        """The next batch; waits for it."""
        queue = self._queues[(self._next - self._first) % len(self._queues)]
        self._next += 1
        return queue.get()

    def stop(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()


def _make_batches(
    queue: "Queue[Batch]",
    maker: SequenceMaker,
    sequences: int,
    length: int,
    seed: str,
    number: int,
    stride: int,
) -> None:
    while True:
        queue.put(maker.batch(sequences, length, f"train {seed} {number}"))
        number += stride


@dataclass(frozen=True, kw_only=True)
class Question:
    """One held-out instance as tokens."""

    task: str
    target: int
    prompt: list[int]
    answer: list[int]


def held_out_questions(
    tokenizer: Tokenizer, tasks: tuple[str, ...], target: int, count: int
) -> list[Question]:
    """`count` instances of each task whose prompts have about `target` tokens."""
    encoder = Encoder(tokenizer)
    questions = []
    for task in tasks:
        for seed in range(count):
            prompt, answer = make_task(task, target - 4, encoder.count, seed)
            questions.append(
                Question(
                    task=task,
                    target=target,
                    prompt=encoder.chat_prompt(prompt),
                    answer=encoder.chat_answer(answer),
                )
            )
    return questions


def load_tokenizer(directory: Path) -> Tokenizer:
    """The one that `write_tokenizer` wrote."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
