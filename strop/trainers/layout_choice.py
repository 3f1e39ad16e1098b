"""Which layouts a model can be trained in, and which one a batch gets."""

from __future__ import annotations

from strop.data.batch import Batch
from strop.trainers.cutting import Cut, cheapest, costs_of, cut_batch
from strop.trainers.layout import LayoutKind
from strop.trainers.rows import RowReader
from strop.types import UserError

_ASKED: tuple[LayoutKind, ...] = ("packed", "shared")


class Cutter:
    """Cuts batches for one model: in the layout that is asked for, or with auto in the cheapest one that the model can read.

    Args:
        reader: of the model.
        layout: the option trainer.layout.
        max_tokens: positions of one forward pass.

    Raises:
        UserError: the layout that is asked for is one that the model cannot read.
    """

    def __init__(self, reader: RowReader, layout: LayoutKind | str, max_tokens: int) -> None:
        self._max_tokens, self._costs = max_tokens, costs_of(reader.model)
        self._kinds: list[LayoutKind]
        if layout == "auto":
            self._kinds = ["padded", *(kind for kind in _ASKED if not reader.fault_of(kind))]
            return
        fault = reader.fault_of(layout) if layout in _ASKED else ""
        if fault:
            name = type(reader.model).__name__
            raise UserError(f"trainer.layout must be padded or auto for {name}, got {layout}: {fault}.")
        self._kinds = [layout]

    def __call__(self, batch: Batch) -> Cut:
        """The micro-batches of a batch; the same ones for the same lengths and prompts."""
        if len(self._kinds) == 1:
            return cut_batch(batch, self._kinds[0], max_tokens=self._max_tokens, costs=self._costs)
        return cheapest(batch, self._kinds, max_tokens=self._max_tokens, costs=self._costs)
