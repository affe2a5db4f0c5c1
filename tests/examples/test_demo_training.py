"""The training code: its model against transformers, its data, and a run that is interrupted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from examples.demo_model.data import ANSWER, Encoder, SequenceMaker, load_tokenizer
from examples.demo_model.export import export
from examples.demo_model.indexing import IndexerLoss, SparseMask, index_scores
from examples.demo_model.model import DemoModel
from examples.demo_model.optimizers import orthogonalised
from examples.demo_model.recipe import TINY
from examples.demo_model.train import prepare
from examples.demo_model.trainer import Trainer
from tests.models.harness import Oracle

CHECKPOINT = Path(__file__).parents[2] / "examples" / "demo_model" / "checkpoint"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder over a small library, with the shipped tokenizer."""
    library = tmp_path_factory.mktemp("library")
    for number in range(12):
        lines = (f"def function_{number}_{i}(x):\n    return x + {i}\n\n" for i in range(200))
        (library / f"module_{number}.py").write_text("".join(lines))
    folder = tmp_path_factory.mktemp("run")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((CHECKPOINT / name).read_bytes())
    prepare(folder, library)
    return folder


@pytest.fixture
def maker(run: Path) -> SequenceMaker:
    return SequenceMaker(load_tokenizer(run), np.load(run / "library-train.npy"), 0.3)


def test_the_exported_model_has_the_logits_of_the_trained_one(run: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = DemoModel(TINY.shapes)
    state = {name: value.bfloat16() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in state.items()})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    torch.save({"model": state}, tmp_path / "state.pt")
    export(tmp_path, tmp_path / "hf", TINY)
    ids = torch.randint(6, TINY.shapes.vocab_size, (150,))  # index_topk is 32
    with torch.no_grad():
        hidden, _ = model(ids[None], sparse=True)
        dense, _ = model(ids[None])
    expected = Oracle(tmp_path / "hf").logits("a", ids.tolist())
    assert (model.logits(hidden) - expected).abs().max() <= 1e-4
    assert (model.logits(dense) - expected).abs().max() > 1e-3


def test_batches_are_their_seeds_and_answers_are_marked(maker: SequenceMaker, run: Path) -> None:
    first, again, other = (maker.batch(3, 1024, seed) for seed in ("a", "a", "b"))
    assert np.array_equal(first.tokens, again.tokens) and np.array_equal(first.kinds, again.kinds)
    assert not np.array_equal(first.tokens, other.tokens)
    assert first.tokens.shape == first.kinds.shape == (3, 1025)
    encoder = Encoder(load_tokenizer(run))
    tokens, kinds = encoder.conversation("text\n", (("Where?", "42"), ("Who?", "me")), chat=True)
    answers = [token for token, kind in zip(tokens, kinds, strict=True) if kind == ANSWER]
    assert answers == [*encoder.chat_answer("42"), *encoder.chat_answer("me")]
    prompt = encoder.chat_prompt("text\n\nWhere?")
    assert tokens[: len(prompt)] == prompt


def test_selection_and_scores_against_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 70, 3, 8, generator=generator)
    keys = torch.randn(2, 70, 8, generator=generator)
    weights = torch.randn(2, 70, 3, generator=generator)
    expected = torch.einsum(
        "bth,bths->bts", weights, torch.einsum("bthd,bsd->bths", query, keys).relu()
    )
    torch.testing.assert_close(index_scores(query, keys, weights), expected)
    mask = SparseMask(query, keys, weights, 9)
    for position in (0, 7, 8, 9, 69):
        best = expected[1, position, : position + 1].topk(min(9, position + 1)).indices
        chosen = (mask.bias[1, 0, position] == 0).nonzero().flatten()
        assert set(chosen.tolist()) == set(best.tolist())


def test_the_indexer_loss_is_zero_only_for_the_attention_itself() -> None:
    """One attention head whose scores the indexer has too: q . k > 0 throughout."""
    key = torch.rand(1, 20, 4) + 0.1
    query = torch.rand(1, 20, 1, 4) + 0.1
    ones = torch.ones(1, 20, 1)
    loss = IndexerLoss(torch.tensor([[3, 19]]))
    scaled = (query * 4**0.5).transpose(1, 2)  # attention divides by sqrt(4)
    assert loss(query, key, ones, scaled, key[:, None], None).abs() < 1e-5
    assert loss(query, key, ones, -scaled, key[:, None], None) > 1e-3


def test_muon_steps_are_nearly_orthogonal() -> None:
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonalised(matrices))
    assert singular.min() > 0.5 and singular.max() < 1.3


def trainer(run: Path, *, stop_after: float) -> Trainer:
    return Trainer(TINY, run, seconds=8, stop_after=stop_after, device=CPU, eval_count=1, workers=1)


def test_an_interrupted_run_goes_on_and_finishes(run: Path) -> None:
    first = trainer(run, stop_after=2)
    assert not first.train()
    first.close()
    saved = torch.load(run / "state.pt", weights_only=True)
    assert saved["step"] >= 1
    second = trainer(run, stop_after=1e9)
    assert second.train()
    second.close()
    rows = (run / "train.csv").read_text().splitlines()
    assert rows[0].startswith("step,phase") and rows[1].startswith("0,dense-256")
    assert len((run / "eval.jsonl").read_text().splitlines()) == len(TINY.phases)
    assert torch.load(run / "state.pt", weights_only=True)["phase"] == len(TINY.phases)
