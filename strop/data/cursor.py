"""The place in the data: which rows come next, over epochs, as a state of two numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from strop.types import DataError, StepMetrics


class Cursor(Protocol):
    """Says which rows come next, and can be saved."""

    def take(self, n: int) -> list[int]: ...

    def observe(self, row: int, mean_reward: float) -> None: ...

    def metrics(self) -> StepMetrics: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def check_same(state: Mapping[str, Any], **here: Any) -> None:
    """A state is of the same data and order as the cursor that it is loaded into.

    Raises:
        DataError: it is not.
    """
    for name, now in here.items():
        if state.get(name) != now:
            raise DataError(
                f"data cursor: {name} must be the same as when the state was saved, "
                f"got {now!r} now and {state.get(name)!r} then. Resume with the data and seed of the run."
            )


class PromptCursor:
    """Hands out row numbers, epoch after epoch, each row once an epoch.

    The order of an epoch follows from (seed, epoch) alone: the rows sorted by the raw output of numpy's Philox, whose
    stream is the same in every numpy version. So the state is an epoch and a position, whatever was taken before.

    Args:
        num_rows: rows of the data, at least 1.
        seed: of the run, 0 or more.
        shuffle: a new order for every epoch; otherwise the order of the data.

    >>> cursor = PromptCursor(3, seed=0, shuffle=False)
    >>> cursor.take(8)
    [0, 1, 2, 0, 1, 2, 0, 1]
    >>> other = PromptCursor(3, seed=0, shuffle=False)
    >>> other.load_state(cursor.state())
    >>> other.take(2)
    [2, 0]
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise DataError(f"the data must have at least one row, got {num_rows}.")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._position = 0
        self._enter(0)

    def take(self, n: int) -> list[int]:
        """The next n rows; they may span epochs."""
        if n < 0:
            raise ValueError(f"n must be 0 or more, got {n}.")
        taken: list[int] = []
        while len(taken) < n:
            part = self._order[self._position : self._position + n - len(taken)]
            taken += part
            self._position += len(part)
            if self._position == self.num_rows:
                self._position = 0
                self._enter(self._epoch + 1)
        return taken

    def observe(self, row: int, mean_reward: float) -> None:
        """Passes take every row, whatever it earned."""

    def metrics(self) -> StepMetrics:
        """Nothing to say."""
        return {}

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, as JSON can hold it."""
        same = {"num_rows": self.num_rows, "seed": self.seed, "shuffle": self.shuffle}
        return {**same, "epoch": self._epoch, "position": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another cursor over the same data stood.

        Raises:
            DataError: the state is of other data, another seed or order, or is damaged.
        """
        check_same(state, num_rows=self.num_rows, seed=self.seed, shuffle=self.shuffle)
        for name, limit in (("epoch", None), ("position", self.num_rows)):
            value = state.get(name)
            if type(value) is not int or value < 0 or (limit is not None and value >= limit):
                rule = "a whole number from 0" + ("" if limit is None else f" to {limit - 1}")
                raise DataError(f"data cursor: {name} must be {rule}, got {value!r}. The saved state is damaged.")
        self._position = state["position"]
        self._enter(state["epoch"])

    def _enter(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = list(range(self.num_rows))
        if self.shuffle:
            keys = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(self.num_rows)
            self._order = np.argsort(keys, kind="stable").tolist()
