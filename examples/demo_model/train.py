"""Trains the demo model on one GPU within a budget of wall-clock time.

python -m examples.demo_model.train --run RUN --minutes 9

Phases after DeepSeek-V3.2's report: dense attention from short to long contexts; the indexers
alone, by KL to the dense attention; sparse attention on what the indexers select, both together.
Each phase has a share of the time. RUN keeps the state: the same command goes on where it stopped.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from echokv.models.byte_tokenizer import write_tokenizer
from examples.demo_model.data import library_tokens, load_tokenizer
from examples.demo_model.recipe import FULL, PRESETS
from examples.demo_model.tokens import library_texts, train_tokenizer
from examples.demo_model.trainer import Trainer

HELD_OUT_TOKENS = 500_000


def prepare(run: Path, library: Path | None) -> None:
    """Train the tokenizer and tokenise the library, once."""
    run.mkdir(parents=True, exist_ok=True)
    if not (run / "tokenizer.json").exists():
        tokenizer = train_tokenizer(library_texts(library, held_out=False))
        write_tokenizer(run, FULL.shapes.max_position_embeddings, tokenizer)
    for split in ("train", "held-out"):
        file = run / f"library-{split}.npy"
        if not file.exists():
            texts = library_texts(library, held_out=split == "held-out")
            tokens = library_tokens(load_tokenizer(run), texts)
            np.save(file, tokens[:HELD_OUT_TOKENS] if split == "held-out" else tokens)


def main() -> None:
    """Parse, prepare, train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of state and logs")
    parser.add_argument("--minutes", type=float, default=15.0, help="of the whole recipe")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds of this call")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="full")
    parser.add_argument(
        "--library", type=Path, help="Python sources; default: the standard library"
    )
    parser.add_argument("--eval-count", type=int, default=32, help="instances of a task and length")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--prepare-only", action="store_true", help="tokenizer and text, then stop")
    parser.add_argument("--evaluate-only", action="store_true", help="evaluate the saved state")
    args = parser.parse_args()
    prepare(args.run, args.library)
    if args.prepare_only:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer is used in forked processes
    trainer = Trainer(
        PRESETS[args.preset],
        args.run,
        seconds=60 * args.minutes,
        stop_after=args.stop_after,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        eval_count=args.eval_count,
        workers=args.workers,
    )
    if args.evaluate_only:
        trainer.evaluate(PRESETS[args.preset].phases[-1], quick=False)
    else:
        print("finished" if trainer.train() else "stopped: run again to go on", flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
