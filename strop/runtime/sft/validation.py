"""Held-out demonstrations: how likely the model finds them, and which model found them likeliest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from strop.data import Demonstration, demonstration_batch
from strop.observe.console import Console
from strop.trainers import TorchTrainer

_AT_ONCE = 64  # demonstrations between two looks at the progress bar


@dataclass(frozen=True)
class Validation:
    """The mean negative log-probability of all held-out tokens that are learned, each with the same weight."""

    step: int
    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else self.loss if math.isnan(self.loss) else math.inf

    def metrics(self) -> dict[str, float]:
        return {"validation/loss": self.loss, "validation/perplexity": self.perplexity}


@dataclass(frozen=True)
class Best:
    """The lowest validation loss so far."""

    step: int = -1
    loss: float = math.inf
    num_since: int = 0  # validations since then

    def after(self, found: Validation) -> Best:
        """What is best once this is known; of equal ones the first. A loss that is no number is never best.

        >>> best = Best().after(Validation(0, 2.0, 5)).after(Validation(3, 1.5, 5)).after(Validation(6, 1.5, 5))
        >>> best.step, best.loss, best.num_since
        (3, 1.5, 1)
        """
        if found.loss < self.loss:
            return Best(found.step, found.loss)
        return replace(self, num_since=self.num_since + 1)


def validate(
    trainer: TorchTrainer, demonstrations: Sequence[Demonstration], *, step: int, console: Console
) -> Validation:
    """The loss over all tokens, summed in float64: how the work is cut changes rounding alone."""
    sums, count = [], 0
    with console.phase("validation", len(demonstrations)):
        for start in range(0, len(demonstrations), _AT_ONCE):
            batch = demonstration_batch(demonstrations[start : start + _AT_ONCE])
            sums.append(float(-trainer.logprobs(batch)[batch.loss_mask].double().sum()))
            count += batch.num_trainable_tokens
            console.advance(start + batch.num_sequences)
    return Validation(step, math.fsum(sums) / count, count)
