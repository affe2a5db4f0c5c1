"""Lossy selection, as systems that hide recalls behind a guess do it; for `bench quality` only.

Each selector stands in for the exact indexer of one request at a time. Prompts are selected
exactly, as these systems do; in a pass of one token (a decoding step) the rows that attention
reads are guessed from something known earlier than the layer's own query. None of them corrects
its guess, so what they lose is what a guess alone loses. Names say "like": each keeps the idea
that names the family, carried over to DSA's one set a layer, not the published system.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from echokv.bench.around_indexer import AroundIndexer
from echokv.cache.batch import ForwardBatch
from echokv.indexer.indexer import Indexer, Selection
from echokv.kernels.reference.name_rows import positions_to_host_slots
from echokv.models.deepseek_v32 import DeepseekV32

REFRESH_STEPS = 4
"""The CLO-like selector selects exactly in one decoding step of so many."""


class LossySelector(AroundIndexer, ABC):
    """The part that all have in common: exact prompts, guessed decoding steps, and a count.

    Args:
        model: the model whose indexer is replaced.
        exact: that indexer.

    Attributes:
        wanted: rows of the exact selections of the guessed steps.
        found: of those, the ones that the guess has too.
    """

    def __init__(self, model: DeepseekV32, exact: Indexer) -> None:
        super().__init__(exact)
        self.wanted = 0
        self.found = 0
        self._index_layers = model.config.index_layers

    def select(
        self, index_layer: int, query: Tensor, weights: Tensor, batch: ForwardBatch
    ) -> Selection:
        """See `Indexer`; rows are the exact ones or a guess."""
        assert batch.block_tables.shape[0] == 1, "lossy selectors follow one request at a time"
        exact = self._exact.select(index_layer, query, weights, batch)
        guess = None
        if batch.num_real_tokens == 1:
            guess = self._guess(index_layer, exact, batch)
        self._note(index_layer, query, weights, exact if guess is None else guess, batch)
        if guess is None:
            return exact
        truth = exact.positions[0][exact.positions[0] >= 0]
        self.wanted += truth.numel()
        self.found += int(torch.isin(truth, guess.positions[0]).sum())
        return guess

    @abstractmethod
    def _guess(self, index_layer: int, exact: Selection, batch: ForwardBatch) -> Selection | None:
        """The selection of a decoding step; None where it stays exact."""

    def _note(
        self,
        index_layer: int,
        query: Tensor,
        weights: Tensor,
        used: Selection,
        batch: ForwardBatch,
    ) -> None:
        """Remember what the next step's guess needs; by default nothing."""


class PreviousLayerInput(LossySelector):
    """InfiniGen-like: layer l's query is made from layer l - 1's input.

    The input of layer l - 1's attention (normed by that layer) goes through layer l's own
    projections; keys are the exact ones. The first layer has no earlier input and stays exact.
    A forward hook on each attention module reads the inputs.
    """

    def __init__(self, model: DeepseekV32, exact: Indexer) -> None:
        super().__init__(model, exact)
        self._attentions: list[Any] = [layer.self_attn for layer in model.layers]
        self._inputs: dict[int, tuple[Any, ...]] = {}
        for number, attention in enumerate(self._attentions):
            attention.register_forward_pre_hook(self._reader(number))

    def _reader(self, layer: int) -> Any:
        def read(_module: Any, args: tuple[Any, ...]) -> None:
            self._inputs[layer] = args

        return read

    def _guess(self, index_layer: int, exact: Selection, batch: ForwardBatch) -> Selection | None:
        layer = self._index_layers[index_layer]
        if layer == 0:
            return None
        x, _, _, angles, _ = self._inputs[layer - 1]
        query, weights = self._attentions[layer].index_query(x, angles)
        return self._exact.select(index_layer, query, weights, batch)


class PreviousStepQuery(LossySelector):
    """FreeKV-like: every layer selects with its query (and head weights) of the token before.

    The key of the current token is scored like the others. FreeKV itself selects anew for heads
    whose query turned too far; this doesn't.
    """

    def __init__(self, model: DeepseekV32, exact: Indexer) -> None:
        super().__init__(model, exact)
        self._last: dict[int, tuple[Tensor, Tensor]] = {}

    def _guess(self, index_layer: int, exact: Selection, batch: ForwardBatch) -> Selection | None:
        query, weights = self._last[index_layer]  # the prompt's last pass left one
        rows = batch.num_tokens
        return self._exact.select(
            index_layer,
            query.expand(rows, -1, -1).contiguous(),
            weights.expand(rows, -1).contiguous(),
            batch,
        )

    def _note(
        self,
        index_layer: int,
        query: Tensor,
        weights: Tensor,
        used: Selection,
        batch: ForwardBatch,
    ) -> None:
        last = slice(batch.num_real_tokens - 1, batch.num_real_tokens)
        self._last[index_layer] = query[last].clone(), weights[last].clone()


class PreviousStepSet(LossySelector):
    """CLO-like: a layer's set is kept from step to step, made anew every REFRESH_STEPS-th.

    In between, the newest token replaces the kept set's row of lowest score (or joins it while
    the set is short of k).
    """

    def __init__(self, model: DeepseekV32, exact: Indexer) -> None:
        super().__init__(model, exact)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # positions [n], scores [n]
        self._age: dict[int, int] = {}

    def _guess(self, index_layer: int, exact: Selection, batch: ForwardBatch) -> Selection | None:
        if self._age[index_layer] + 1 == REFRESH_STEPS:
            return None
        positions, scores = self._kept[index_layer]
        if positions.numel() == self.topk:
            stays = torch.arange(self.topk, device=scores.device) != scores.argmin()
            positions, scores = positions[stays], scores[stays]
        positions = torch.cat((positions, batch.positions[:1]))
        scores = torch.cat((scores, scores.amax(0, keepdim=True)))
        chosen = torch.full_like(exact.positions, -1)
        chosen[0, : positions.numel()] = positions  # the newest token's position is the highest
        kept = torch.full_like(exact.scores, float("-inf"))
        kept[0, : positions.numel()] = scores
        return Selection(
            positions=chosen,
            host_slots=positions_to_host_slots(chosen, batch.request_rows, batch.block_tables),
            scores=kept,
            kth_scores=exact.kth_scores,
        )

    def _note(
        self,
        index_layer: int,
        query: Tensor,
        weights: Tensor,
        used: Selection,
        batch: ForwardBatch,
    ) -> None:
        last = batch.num_real_tokens - 1
        valid = used.positions[last] >= 0
        self._kept[index_layer] = used.positions[last][valid], used.scores[last][valid]
        decoding = batch.num_real_tokens == 1
        age = self._age[index_layer] + 1 if decoding else 0
        self._age[index_layer] = age % REFRESH_STEPS


LOSSY: dict[str, type[LossySelector]] = {
    "infinigen-like": PreviousLayerInput,
    "freekv-like": PreviousStepQuery,
    "clo-like": PreviousStepSet,
}
"""By the name that `bench quality` and its results use."""
