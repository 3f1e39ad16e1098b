"""Which layouts a model can be trained in, and which one a batch gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.data.batch import Batch
from strop.trainers.cutting import Cut, Part, cheapest, costs_of, cut_batch, shares
from strop.trainers.layout import LayoutKind
from strop.trainers.ranks import Ranks
from strop.trainers.rows import RowReader
from strop.types import UserError

_ASKED: tuple[LayoutKind, ...] = ("packed", "shared")


class Cutter:
    """Cuts batches for one model: in the layout that is asked for, or with auto in the cheapest one that the model can read.

    Args:
        reader: of the model.
        layout: the option trainer.layout.
        max_tokens: positions of one forward pass.
        ranks: that share a batch.

    Raises:
        UserError: the layout that is asked for is one that the model cannot read.
    """

    def __init__(
        self, reader: RowReader, layout: LayoutKind | str, max_tokens: int, ranks: Ranks | None = None
    ) -> None:
        self._max_tokens, self._costs, self._ranks = max_tokens, costs_of(reader.model), ranks or Ranks()
        self._kinds: list[LayoutKind]
        if self._ranks.divides_rows:
            self._kinds = ["padded"]  # another layout is refused by the options
            return
        if layout == "auto":
            self._kinds = ["padded", *(kind for kind in _ASKED if not reader.fault_of(kind))]
            return
        fault = reader.fault_of(layout) if layout in _ASKED else ""
        if fault:
            name = type(reader.model).__name__
            raise UserError(f"trainer.layout must be padded or auto for {name}, got {layout}: {fault}.")
        self._kinds = [layout]

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
