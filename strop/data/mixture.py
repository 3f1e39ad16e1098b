"""Prompts of several sources in the shares that the config gives them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from strop.config import CurriculumOptions, DataOptions
from strop.data.curriculum import AccuracyCurriculum
from strop.data.cursor import Cursor, PromptCursor, check_same
from strop.types import DataError, Prompt, StepMetrics, merge_metrics


class SourceMixture:
    """Hands out row numbers: for each a source is drawn by its weight, and that source's own cursor says which row.

    The draw follows from (seed, number of rows taken) alone. So the state is that number and the states of the cursors.

    Args:
        rows: source to its rows.
        weights: source to its share relative to the others; 0 leaves it out.
        seed: of the run, 0 or more.
        make: a cursor over so many rows, from their number and a seed.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        weights: Mapping[str, float],
        *,
        seed: int,
        make: Callable[[int, int], Cursor],
    ) -> None:
        self.names = sorted(name for name, weight in weights.items() if weight > 0)
        self.seed, self._rows, self._num_taken = seed, rows, 0
        self.weights = [weights[name] for name in self.names]
        self._bounds = list(accumulate(self.weights))
        self._cursors = {name: make(len(rows[name]), _seed_of(seed, name)) for name in self.names}
        self._place = {row: (name, place) for name in self.names for place, row in enumerate(rows[name])}

    def take(self, n: int) -> list[int]:
        """The next n rows."""
        names = [self._draw(self._num_taken + i) for i in range(n)]
        taken = {name: iter(cursor.take(names.count(name))) for name, cursor in self._cursors.items()}
        self._num_taken += n
        return [self._rows[name][next(taken[name])] for name in names]

    def _draw(self, number: int) -> str:
        raw = np.random.Philox(np.random.SeedSequence([self.seed, number], spawn_key=(2,))).random_raw()
        at = int(raw) / 2.0**64 * self._bounds[-1]
        return next((name for name, bound in zip(self.names, self._bounds, strict=True) if at < bound), self.names[-1])

    def observe(self, row: int, mean_reward: float) -> None:
        """Hand on what a row's rollouts earned."""
        name, place = self._place[row]
        self._cursors[name].observe(place, mean_reward)

    def metrics(self) -> StepMetrics:
        """Those of all cursors."""
        return merge_metrics(cursor.metrics() for cursor in self._cursors.values())

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, as JSON can hold it."""
        states = {name: cursor.state() for name, cursor in self._cursors.items()}
        return {"names": self.names, "weights": self.weights, "seed": self.seed, "taken": self._num_taken, "of": states}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another mixture over the same data stood.

        Raises:
            DataError: the state is of other data or weights, or is damaged.
        """
        check_same(state, names=self.names, weights=self.weights, seed=self.seed)
        taken, states = state.get("taken"), state.get("of")
        if type(taken) is not int or taken < 0 or not isinstance(states, dict) or set(states) != set(self.names):
            raise DataError("data cursor: the saved state of the sources is damaged.")
        self._num_taken = taken
        for name, cursor in self._cursors.items():
            cursor.load_state(states[name])


def _seed_of(seed: int, name: str) -> int:
    """A seed for the passes of a source, so that sources of one size have orders of their own."""
    words = np.random.SeedSequence([seed, zlib.crc32(name.encode())], spawn_key=(3,)).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def make_cursor(prompts: Sequence[Prompt], data: DataOptions, curriculum: CurriculumOptions, *, seed: int) -> Cursor:
    """The cursor that the options ask for.

    Raises:
        DataError: `data.source_weights` does not fit the sources of the prompts.
    """

    def make(num_rows: int, seed: int) -> Cursor:
        if curriculum.kind == "none":
            return PromptCursor(num_rows, seed=seed, shuffle=data.shuffle)
        return AccuracyCurriculum(num_rows, seed=seed, shuffle=data.shuffle, options=curriculum)

    if not data.source_weights:
        return make(len(prompts), seed)
    rows: dict[str, list[int]] = {}
    for prompt in prompts:
        if prompt.source is None:
            raise DataError(
                f"data.source_weights needs a source in every row, got none in row {prompt.row}: "
                f"{sum(p.source is None for p in prompts)} of {len(prompts)} rows have no column that data.source_key names."
            )
        rows.setdefault(prompt.source, []).append(prompt.row)
    for what, wrong in (
        ("must name sources of the data", set(data.source_weights) - set(rows)),
        ("must give every source of the data a weight, 0 to leave it out", set(rows) - set(data.source_weights)),
    ):
        if wrong:
            verb = "got" if what.startswith("must name") else "got none for"
            there = f"The data has {', '.join(sorted(rows))}."
            raise DataError(f"data.source_weights {what}, {verb} {', '.join(sorted(wrong))}. {there}")
    return SourceMixture(rows, data.source_weights, seed=seed, make=make)
