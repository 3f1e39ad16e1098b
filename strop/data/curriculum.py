"""Prompts by what was seen of them: those whose mean reward is near a target are likelier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from strop.config.filtering import AccuracyCurriculumOptions
from strop.data.cursor import PromptCursor, check_same
from strop.types import DataError, Metric, StepMetrics


class AccuracyCurriculum:
    """Hands out row numbers: each once in a first pass, from then on by the mean reward that was observed of it.

        m_i    <- m_i + rate (r_i - m_i),  r_i the mean reward of a new group; the first group sets m_i = r_i
        weight_i = exp(-|m_i - target_reward| / width),  1 for a row of which no reward was observed

    What is taken at once has no row twice, as long as there are enough: the rows are drawn without replacement, by the
    largest log weight_i - log(-log u_i) with u from (seed, draw) alone. So the state is the place in the first pass, the
    number of draws, and the means.

    Args:
        num_rows: rows of the data, at least 1.
        seed: of the run, 0 or more.
        shuffle: whether the first pass is.
        options: the table `[curriculum]`.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool, options: AccuracyCurriculumOptions) -> None:
        self._first_pass = PromptCursor(num_rows, seed=seed, shuffle=shuffle)
        self.num_rows, self.seed, self.options = num_rows, seed, options
        self._num_taken = self._num_draws = 0
        self._means: dict[int, float] = {}

    def take(self, n: int) -> list[int]:
        """The next n rows."""
        first = self._first_pass.take(min(n, self.num_rows - min(self._num_taken, self.num_rows)))
        taken = list(first)
        while len(taken) < n:
            taken += self._draw(min(n - len(taken), self.num_rows), but=taken if len(taken) < self.num_rows else [])
        self._num_taken = min(self._num_taken + len(first), self.num_rows)
        return taken

    def _draw(self, n: int, *, but: list[int]) -> list[int]:
        """Up to n different rows by their weights, none of those that are taken already."""
        stream = np.random.Philox(np.random.SeedSequence([self.seed, self._num_draws], spawn_key=(1,)))
        self._num_draws += 1
        uniform = ((stream.random_raw(self.num_rows) >> 12).astype(np.float64) + 0.5) / 2.0**52  # never 0 or 1
        keys = self._log_weights() - np.log(-np.log(uniform))
        keys[but] = -math.inf
        return np.argsort(-keys, kind="stable")[: min(n, self.num_rows - len(but))].tolist()

    def _log_weights(self) -> Any:
        found = np.zeros(self.num_rows)
        for row, mean in self._means.items():
            found[row] = -abs(mean - self.options.target_reward) / self.options.width
        return found

    def observe(self, row: int, mean_reward: float) -> None:
        """Learn what a group of a row's rollouts earned on average."""
        before = self._means.get(row)
        rate = self.options.rate
        self._means[row] = mean_reward if before is None else before + rate * (mean_reward - before)

    def metrics(self) -> StepMetrics:
        """Mean observed reward over the rows seen, and the share of rows seen."""
        return {
            "curriculum/mean_accuracy": Metric.mean(sum(self._means.values()), len(self._means)),
            "curriculum/seen": Metric.mean(len(self._means), self.num_rows),
        }

    def state(self) -> dict[str, Any]:
        """What `load_state` needs, as JSON can hold it."""
        means = [[row, mean] for row, mean in self._means.items()]
        place = {"first_pass": self._first_pass.state(), "num_taken": self._num_taken, "num_draws": self._num_draws}
        return {"curriculum": "accuracy", **place, "means": means}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another curriculum over the same data stood.

        Raises:
            DataError: the state is of other data, of no curriculum, or is damaged.
        """
        check_same(state, curriculum="accuracy")
        try:
            self._num_taken, self._num_draws = int(state["num_taken"]), int(state["num_draws"])
            self._means = {int(row): float(mean) for row, mean in state["means"]}
            self._first_pass.load_state(state["first_pass"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"data cursor: the saved state is damaged ({type(error).__name__}: {error}).") from error
