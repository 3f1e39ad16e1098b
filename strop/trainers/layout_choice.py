"""Which layouts a model can be trained in, and which one a batch gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strop.data.batch import Batch
from strop.trainers.cutting import Cut, Part, cheapest, costs_of, cut_batch, shares
from strop.trainers.layout import LayoutKind
from strop.trainers.ranks import Ranks
from strop.trainers.rows import RowReader
from strop.types import UserError

_ASKED: tuple[LayoutKind, ...] = ("packed", "shared")


def readable(reader: RowReader, layout: LayoutKind | str, ranks: Ranks) -> list[LayoutKind]:
    """The layouts that a model may be trained in: that which the option trainer.layout asks for, or with auto all that it can
    read.

    Raises:
        UserError: the layout that is asked for is one that the model cannot read.
    """
    if ranks.divides_rows:
        return ["padded"]  # another layout is refused by the options
    if layout == "auto":
        return ["padded", *(kind for kind in _ASKED if not reader.fault_of(kind))]
    fault = reader.fault_of(layout) if layout in _ASKED else ""
    if fault:
        name = type(reader.model).__name__
        raise UserError(f"trainer.layout must be padded or auto for {name}, got {layout}: {fault}.")
    return [layout]


class Cutter:
    """Cuts batches for one model, in the cheapest of some layouts.

    Args:
        model: a Hugging Face model, or its skeleton.
        kinds: layouts, of which one is taken for each batch.
        max_tokens: positions of one forward pass.
        ranks: that share a batch.
    """

    def __init__(self, model: Any, kinds: list[LayoutKind], max_tokens: int, ranks: Ranks | None = None) -> None:
        self._kinds, self._max_tokens = kinds, max_tokens
        self._costs, self._ranks = costs_of(model), ranks or Ranks()

    def __call__(self, batch: Batch) -> Cut:
        """The micro-batches of a batch that have something to train on, the same ones for the same lengths and prompts; of
        several ranks those of this rank's share, and as many empty ones as another rank has more."""
        if self._ranks.size == 1:
            return self._cut(batch, range(batch.num_sequences))
        found = shares(batch, self._ranks.num_shares, self._costs, by_prompt="shared" in self._kinds)
        cut = self._cut(batch, found[self._ranks.share])
        most = max(self._ranks.collected(len(cut.parts)))
        return replace(cut, parts=cut.parts + [Part([])] * (most - len(cut.parts)))

    def _cut(self, batch: Batch, share: Sequence[int]) -> Cut:
        mine = batch if len(share) == batch.num_sequences else batch.select(share)
        if not mine.loss_mask.any():
            return Cut(self._kinds[0], [], 0, 0, 0.0)
        if len(self._kinds) == 1:
            cut = cut_batch(mine, self._kinds[0], max_tokens=self._max_tokens, costs=self._costs)
        else:
            cut = cheapest(mine, self._kinds, max_tokens=self._max_tokens, costs=self._costs)
        trained = set(mine.sequence_ids[mine.loss_mask].tolist())
        parts = [
            Part([share[s] for s in part.sequences], part.rows) for part in cut.parts if trained & set(part.sequences)
        ]
        return replace(cut, parts=parts)
