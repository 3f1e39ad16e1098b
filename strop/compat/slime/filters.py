"""Runs slime's dynamic sampling filters: `f(args, samples, **kwargs)`, true or an object with `keep` and `reason`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.compat.slime.reward import SlimeArgs
from strop.compat.slime.sample import Sample, sample_of
from strop.types import Group


@dataclass
class DynamicFilterOutput:
    """What a filter of slime's returns, under its name there."""

    keep: bool
    reason: str | None = None


class _FilterArgs(SlimeArgs):
    table = "filter.group_args"


class SlimeGroupFilter:
    """Asks a filter of slime's whether a group stays; `reason` is what it said of the last one that it dropped.

    Args:
        function: takes (args, samples).
        args: attributes of `args`.
    """

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
        self._function = function
        self._args = _FilterArgs({"reward_key": None, **args})
        self._numbers = itertools.count()
        known = sys.modules.get("slime.utils.types")
        self._sample_class = known.Sample if known else Sample
        self.reason: str | None = None

    def __call__(self, group: Group) -> Any:
        """What the function says of a group's samples; of an output object, its `keep`."""
        samples = [sample_of(rollout, next(self._numbers), self._sample_class) for rollout in group.rollouts]
        for sample, rollout in zip(samples, group.rollouts, strict=True):
            sample.reward = dict(rollout.reward_parts) if rollout.reward_parts else rollout.reward
        answer = self._function(self._args, samples)
        reason = answer.reason if hasattr(answer, "keep") else None
        self.reason = None if reason is None else str(reason).replace("/", "_")
        return answer.keep if hasattr(answer, "keep") else answer
