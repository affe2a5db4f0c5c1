"""The demo model's tokenizer: byte-level BPE of 2,048 tokens, trained on the standard library.

Words that hold a digit (numbers, UUID groups) are cut into pairs of characters, so that a number
has the same tokens wherever it stands.
"""

import sysconfig
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from echokv.bench.filler import is_held_out
from echokv.bench.tasks import TASKS, make_document
from echokv.models.byte_tokenizer import BOS, SPECIAL_TOKENS

VOCAB_SIZE = 2048

PIECES = (
    r"(?=[A-Za-z]*[0-9])[A-Za-z0-9]{1,2}"  # of a word with a digit: pairs
    r"| ?[A-Za-z]+(?![A-Za-z]*[0-9])"  # other words, the space before included
    r"| ?[^\sA-Za-z0-9]+"  # punctuation, and letters beyond ASCII
    r"|\n+ *"  # line ends with the indentation that follows
    r"| +|\s"
)

MOST_BYTES = 300_000
"""Larger files are tables."""


def library_texts(root: Path | None, *, held_out: bool) -> Iterator[tuple[str, str]]:
    """(name, text) of one split of a Python library's files, its tests included.

    Args:
        root: the library's folder; None: this interpreter's standard library.
        held_out: the files kept for evaluation, or the others.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if "-packages/" in name or file.stat().st_size > MOST_BYTES:
            continue
        if is_held_out(name) == held_out:
            yield name, file.read_text(encoding="utf-8", errors="ignore")


def _training_texts(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    rng = Random("tokenizer")
    for _ in range(20_000):
        yield str(uuid.UUID(int=rng.getrandbits(128), version=4))
    for name in TASKS:
        for _ in range(100):
            document = make_document(name, 400, len, rng, questions=4)
            yield document.text
            yield from (question for question, _ in document.questions)
    for _, text in texts:
        yield text


def train_tokenizer(texts: Iterable[tuple[str, str]]) -> Tokenizer:
    """From (name, text) pairs. Special tokens have ids 0 to 5; encoding puts bos first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer
