"""The recipe as data: phases, sizes, learning rates."""

from dataclasses import dataclass

from examples.demo_model.model import Shapes


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One part of the recipe.

    kind: "dense", "indexer" or "sparse". length: tokens a sequence. share: of the time.
    scale: learning rate at the phase's begin and end, as a factor. text: share of passages.
    """

    kind: str
    length: int
    share: float
    scale: tuple[float, float]
    text: float = 0.3

    @property
    def name(self) -> str:
        """For logs and seeds."""
        return f"{self.kind}-{self.length}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes of a run."""

    shapes: Shapes
    phases: tuple[Phase, ...]
    batch_tokens: int
    index_queries: int
    eval_lengths: tuple[int, ...]
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    index_lr: float = 2e-3


FULL = Preset(
    shapes=Shapes(),
    phases=(
        Phase(kind="dense", length=512, share=0.10, scale=(1.0, 1.0)),
        Phase(kind="dense", length=2048, share=0.16, scale=(1.0, 0.9)),
        Phase(kind="dense", length=8192, share=0.18, scale=(0.9, 0.5)),
        Phase(kind="dense", length=16384, share=0.12, scale=(0.5, 0.25)),
        Phase(kind="indexer", length=8192, share=0.12, scale=(1.0, 0.5)),
        Phase(kind="sparse", length=4096, share=0.12, scale=(0.25, 0.2)),
        Phase(kind="sparse", length=8192, share=0.10, scale=(0.2, 0.12)),
        Phase(kind="sparse", length=16384, share=0.10, scale=(0.12, 0.01)),
    ),
    batch_tokens=65536,
    index_queries=256,
    eval_lengths=(1024, 4096, 8192, 16000),
)

TINY = Preset(
    shapes=Shapes(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        q_lora_rank=48,
        intermediate_size=128,
        moe_intermediate_size=32,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=32,
    ),
    phases=(
        Phase(kind="dense", length=256, share=0.6, scale=(1.0, 0.5)),
        Phase(kind="indexer", length=256, share=0.2, scale=(1.0, 0.5)),
        Phase(kind="sparse", length=256, share=0.2, scale=(0.4, 0.1)),
    ),
    batch_tokens=4096,
    index_queries=32,
    eval_lengths=(256,),
)
PRESETS = {"full": FULL, "tiny": TINY}
