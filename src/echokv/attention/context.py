"""What a forward pass needs besides weights and tokens: the memory it reads and writes."""

from collections.abc import Callable
from dataclasses import dataclass

from echokv.attention.sparse_mla import SparseAttention
from echokv.cache.batch import ForwardBatch
from echokv.cache.side_stream import SideStream
from echokv.indexer.indexer import Selection, TokenSelector

SelectionObserver = Callable[[int, ForwardBatch, Selection], None]
"""Called with (layer, batch, selection) after each layer that runs its indexer."""


@dataclass(frozen=True)
class ForwardContext:
    """The indexer and the attention of one engine; `observer` sees selections (tests, traces).

    `beside` is where a decode step of few tokens makes its attention queries while the indexer
    selects; None: always afterwards.
    """

    indexer: TokenSelector
    attention: SparseAttention
    observer: SelectionObserver | None = None
    beside: SideStream | None = None
