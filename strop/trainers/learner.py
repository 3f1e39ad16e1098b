"""What the policy's trainer and the critic's have in common: a model, whatever learns of it in this rank, and its updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from strop.trainers import state
from strop.trainers.ranks import Ranks, everywhere
from strop.trainers.updates import Updates


class Learner(ABC):
    """A model that learns in all ranks.

    Attributes:
        model: the whole model, in rank 0.
        ranks: that share the work.
        is_torn: True where `publish` was broken off.
    """

    model: Any
    ranks: Ranks
    is_torn = False
    _learning: Any  # the model itself, or this rank's part of it
    _updates: Updates

    @property
    def num_steps(self) -> int:
        """Optimizer steps made."""
        return self._updates.num_steps

    @everywhere
    def publish(self) -> None:
        """Bring `model` up to date, where it is not itself what learns."""
        self.is_torn = True
        self.ranks.publish(self._learning, self.model)
        self.is_torn = False

    @everywhere
    def remember(self, *, moments: bool) -> None:
        """Keep a copy of what the optimizer moves, and with `moments` of what it remembers, to go back to."""
        self._updates.remember(moments=moments)

    @everywhere
    def go_back(self) -> None:
        """Set the weights to what was remembered; moments, too, if they were."""
        self._updates.go_back()

    @everywhere
    def forget(self) -> None:
        """Free what was remembered."""
        self._updates.forget()

    @abstractmethod
    def snapshot(self) -> state.Write:
        """Copy what a checkpoint holds to host memory; what is returned writes the copy."""

    def save(self, folder: Path) -> None:
        """Write a snapshot into a folder that exists."""
        self.snapshot()(folder)
