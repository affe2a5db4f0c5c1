"""What selectors that stand around the product's indexer have in common."""

from torch import Tensor

from echokv.cache.batch import ForwardBatch
from echokv.indexer.indexer import TokenSelector


class AroundIndexer:
    """All of a `TokenSelector` but `select`: passes and keys are the indexer's.

    Args:
        exact: the engine's indexer.
    """

    def __init__(self, exact: TokenSelector) -> None:
        self.topk = exact.topk
        self._exact = exact

    def begin_pass(self, batch: ForwardBatch) -> None:
        """See `Indexer`."""
        self._exact.begin_pass(batch)

    def append(self, index_layer: int, keys: Tensor, batch: ForwardBatch) -> None:
        """See `Indexer`."""
        self._exact.append(index_layer, keys, batch)
