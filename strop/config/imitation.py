"""Options of `strop sft` alone: how its loss is averaged, and held-out demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from strop.config.base import Idle, Options
from strop.config.data import DemonstrationOptions


class LossOptions(Options):
    """The loss of imitation: the negative log-probability of each token that is learned."""

    reduction: Literal["token_mean", "sequence_mean", "constant_length"] = Field(
        default="token_mean",
        description="How the loss of a step is averaged; constant_length divides by data.max_length_tokens.",
    )


class ValidationOptions(Options):
    """Held-out demonstrations: loss and perplexity before the first step, every so often, and after the last."""

    data: DemonstrationOptions | None = Field(
        default=None, description="The held-out demonstrations; none means no validation."
    )
    every_steps: int = Field(
        default=0, ge=0, description="Validate after every so many steps; 0 means only before and after."
    )
    keep_best: bool = Field(
        default=True, description="Keep the model with the lowest validation loss in best/ of the run folder."
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Stop after so many validations in a row without a new lowest loss; none means never.",
    )

    def idle(self) -> Iterator[Idle]:
        if self.data is None:
            for name in type(self).model_fields:
                if name != "data":
                    yield Idle(name, "cannot act without validation.data")
            return
        yield Idle("data.shuffle", "cannot act: a validation takes all demonstrations, whatever their order")
        yield Idle("data.batch_size", "cannot act: a validation takes all demonstrations at once")
        if self.every_steps == 0:
            yield Idle("patience", "is only used when validation.every_steps is above 0")
