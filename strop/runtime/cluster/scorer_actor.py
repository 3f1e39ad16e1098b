"""Scoring of a cluster as an actor: a scorer of its own, and the worker processes that it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from strop.config import RewardOptions
from strop.rewards import make_scorer
from strop.rewards.reading import Outcome
from strop.types import Rollout, StepMetrics


class ScorerActor:
    """Scores what it is handed.

    Args:
        number: of the actor.
        options: `[reward]`.
        folder: to work in, where there is such a folder.
    """

    def __init__(self, number: int, options: RewardOptions, folder: str) -> None:
        self._number = number
        if Path(folder).is_dir():
            os.chdir(folder)
        self._scorer = make_scorer(options)

    def __repr__(self) -> str:
        return f"scorer {self._number}"

    def outcomes(self, rollouts: Sequence[Rollout]) -> tuple[list[Outcome], StepMetrics]:
        return self._scorer.outcomes(rollouts)

    def close(self) -> None:
        self._scorer.close()
