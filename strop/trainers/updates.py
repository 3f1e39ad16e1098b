"""Optimizer steps in micro-batches: what every trainer and the critic's have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.config import AdamWOptions
from strop.data.batch import Batch
from strop.trainers import state
from strop.trainers.cutting import Cut
from strop.trainers.ranks import Ranks
from strop.trainers.schedule import lr_factor
from strop.types import GuardError, Metric, StepMetrics, merge_metrics

# A micro-batch, with what a kind of trainer knows of it (such as what stands in its rows), to its weighted loss, which carries
# gradient, and its metrics.
WeightedLoss = Callable[..., tuple[Tensor, StepMetrics]]


@dataclass(frozen=True)
class Moment:
    """Weights, and what an optimizer remembers if that was asked for, as they were: copies in host memory, of what is this
    rank's."""

    num_steps: int
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] | None


class Updates(ABC):
    """Optimizer steps on what a kind of trainer has: how they are made, in which order, and what stops one.

    Args:
        options: AdamW and its learning rate.
        total_steps: optimizer steps of the whole run, the length of the schedule; may be set anew.
        ranks: that share the work.
        owner: whose loss it is, in messages: "" or "the critic's ".
    """

    optimizer: Any  # of torch, or with its param_groups

    def __init__(self, options: AdamWOptions, *, total_steps: int, ranks: Ranks, owner: str = "") -> None:
        self.options = options
        self.total_steps = total_steps
        self.num_steps = 0  # made
        self._ranks, self._owner = ranks, owner
        self._remembered: Moment | None = None

    def step(
        self,
        batch: Batch,
        cut: Cut,
        weighted_loss: WeightedLoss,
        guard: Callable[[StepMetrics], None] = lambda metrics: None,
    ) -> StepMetrics:
        """One optimizer step on the whole batch: the sum of weight x loss over its micro-batches.

        Args:
            batch: with at least one trainable token.
            cut: of the batch into micro-batches.
            weighted_loss: of a micro-batch.
            guard: sees the metrics before the optimizer moves, and may raise.

        Raises:
            GuardError: before the optimizer moves: a loss or gradient that is not finite (naming the sequences).
            ModelError: before the optimizer moves: a micro-batch that does not fit memory, or that the model cannot read.
        """
        self._zero_grad()
        parts = self._accumulate(batch, cut, weighted_loss)
        metrics = self._ranks.merged(merge_metrics([*parts, cut.metrics()]))
        metrics["loss"] = Metric.mean(metrics["loss"].total, 1)  # parts add up to the step's loss; steps are averaged
        if not math.isfinite(metrics["loss"].total):
            raise self._blaming(batch, weighted_loss)
        self._ranks.first(lambda: guard(metrics))
        norm = self._clip_gradients(self.options.max_grad_norm)
        if not math.isfinite(norm):
            raise self._blaming(batch, weighted_loss)
        lr = self._set_lr()
        self._move()
        self._zero_grad()
        self.num_steps += 1
        return metrics | {"grad_norm": Metric.mean(norm, 1), "lr": Metric("max", lr)}

    @abstractmethod
    def _zero_grad(self) -> None:
        """Free or clear all gradients, also those of a backward pass that was broken off."""

    @abstractmethod
    def _accumulate(self, batch: Batch, cut: Cut, weighted_loss: WeightedLoss) -> list[StepMetrics]:
        """Forward and backward of the micro-batches of this rank; their losses are among the metrics."""

    @abstractmethod
    def _is_finite(self, part: Batch, weighted_loss: WeightedLoss) -> bool:
        """Are loss and gradient of one sequence finite? All ranks make the same pass, and find the same."""

    @abstractmethod
    def _clip_gradients(self, max_norm: float) -> float:
        """Scale gradients down to a global norm where theirs is larger; returns what it was."""

    @abstractmethod
    def _move(self) -> None:
        """Step the optimizer, and bring the weights up to date."""

    @abstractmethod
    def remember(self, *, moments: bool) -> None:
        """Keep a copy of the weights, and with `moments` of what the optimizer remembers, to go back to."""

    @abstractmethod
    def go_back(self) -> None:
        """Set the weights to what was remembered, and the optimizer to what it was if its moments were."""

    def forget(self) -> None:
        """Free what was remembered."""
        self._remembered = None

    @abstractmethod
    def digest(self, *, beside: str = "") -> str:
        """A checksum of the weights, and of a text, eight hexadecimal digits: equal weights have equal ones, others hardly
        ever."""

    @abstractmethod
    def snapshot(self, *, prefix: str = "") -> state.Write:
        """Copy weights (float32 masters where there are), moments and the step count; what is returned writes them."""

    @abstractmethod
    def load(self, folder: Path, *, prefix: str = "") -> None:
        """Read what a snapshot wrote."""

    def _blaming(self, batch: Batch, weighted_loss: WeightedLoss) -> GuardError:
        """What to raise: which sequences make the loss or the gradient not finite, each tried alone."""
        guilty = []
        for index, name in enumerate(batch.names):
            part = batch.select([index])
            if not part.loss_mask.any():
                continue
            self._zero_grad()
            if not self._is_finite(part, weighted_loss):
                guilty.append(name)
        self._zero_grad()
        named = ", ".join(guilty[:5]) + (f" and {len(guilty) - 5} more" if len(guilty) > 5 else "")
        return GuardError(
            f"{self._owner}loss or gradient is not finite; the step was not made. "
            f"It comes from {named or 'no sequence alone'}.",
            guard="non_finite",
            blamed=guilty,
        )

    def _set_lr(self) -> float:
        options = self.options
        lr = options.lr * lr_factor(
            self.num_steps,
            total_steps=self.total_steps,
            warmup_steps=options.warmup_steps,
            schedule=options.lr_schedule,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr
