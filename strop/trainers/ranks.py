"""The processes that hold a learner together, called ranks. Rank 0 is the one that the loop runs in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.trainers.sharding import Within
from strop.types import StepMetrics

T = TypeVar("T")


class Ranks:
    """One process: whatever is summed, gathered or agreed on is its own. Several are a `TogetherRanks`."""

    rank, size = 0, 1
    share, num_shares = (
        0,
        1,
    )  # of a batch: which one this rank has, of how many; ranks that divide layers or rows have the same
    divides_rows = False
    is_whole = True  # False once a rank is lost: nothing can be asked of the others any more

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def make(
        self, kind: Callable[..., T], model: Any, *args: Any, here: dict[str, Any] | None = None, **more: Any
    ) -> T:
        """A learner, `kind(model, *args, ranks=, **more)`, in every rank; in this one with what only it can have, too."""
        return kind(model, *args, ranks=self, **more, **(here or {}))

    def everywhere(self, method: Callable[..., T], learner: Any, args: tuple[Any, ...], more: dict[str, Any]) -> T:
        """A method of a learner, in every rank at the same time; what it returns in this one."""
        return method(learner, *args, **more)

    def place(self, model: Any) -> tuple[Any, Within | None]:
        """What learns, the model itself or this rank's part of it; and what its passes must be made within."""
        return model, None

    def frozen(self, model: Any) -> tuple[Any, Within | None]:
        """A copy of the model as it is now that never learns, as `place` gives what does."""
        return copy.deepcopy(model).requires_grad_(False), None

    def publish(self, learning: Any, model: Any) -> None:
        """Set rank 0's whole model to what was learned, where they are not the same."""

    def first(self, work: Callable[[], T]) -> T | None:
        """The work done by rank 0 alone; its error ends the others' method too. None in the others."""
        return work()

    def told(self, value: T) -> T:
        """Rank 0's value."""
        return value

    def collected(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        return [value]

    def summed(self, numbers: Tensor) -> Tensor:
        """Numbers added up over ranks, on the host."""
        return numbers

    def full(self, tensor: Tensor) -> Tensor:
        """All of a tensor that ranks may hold in parts."""
        return tensor

    @torch.no_grad()
    def fill(self, tensor: Tensor, values: Tensor | None) -> None:
        """Set a tensor to rank 0's values; those of the others are not looked at."""
        assert values is not None
        tensor.copy_(values)

    def clip_gradients(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to a global norm where theirs is larger; returns what it was."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def merged(self, metrics: StepMetrics) -> StepMetrics:
        """Metrics of all ranks as one."""
        return metrics


def everywhere(method: Callable[..., T]) -> Callable[..., T]:
    """Around a method of a learner that has `ranks`: called in rank 0, it runs in every rank, with the same arguments."""

    @wraps(method)
    def run(self: Any, *args: Any, **more: Any) -> T:
        return self.ranks.everywhere(method, self, args, more)

    return run
