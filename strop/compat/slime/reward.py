"""Runs slime's reward functions: `async def f(args, sample)`, or with a list of the samples of one prompt."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from strop.compat.slime.sample import Sample, sample_of
from strop.types import RewardError, Rollout

Call = Callable[[], Coroutine[Any, Any, Any]]


class SlimeArgs:
    """slime's `args`: the values of a table of the config as attributes.

    >>> SlimeArgs({"rm_url": "http://here"}).rm_url
    'http://here'
    """

    table = "reward.args"

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        """Only called for what is not there; an AttributeError, so that getattr with a default and hasattr work."""
        if name.startswith("__"):
            raise AttributeError(name)
        there = ", ".join(sorted(vars(self)))
        raise AttributeError(f"args.{name} is not there. Set it in the table [{self.table}], which has {there}.")


class SlimeReward:
    """Scores a list of rollouts with a function of slime's. A function that raises gives the exception in place of a score.

    Args:
        function: takes (args, sample), or (args, samples) with is_batched; plain or async.
        name: of the function, for messages.
        args: attributes of `args`, beside reward_key.
        run: runs calls side by side; an exception in place of the result of one that raised.
        reward_key: which value of a returned dict is the reward; None leaves a dict as named rewards.
        is_batched: the function takes the samples of one prompt and returns as many scores (slime's --group-rm).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        args: Mapping[str, Any],
        *,
        run: Callable[[list[Call]], list[Any]],
        reward_key: str | None = None,
        is_batched: bool = False,
    ) -> None:
        self.name, self._function, self._reward_key, self._is_batched = name, function, reward_key, is_batched
        self._run = run
        self._args = SlimeArgs({"reward_key": reward_key, **args})
        self._numbers = itertools.count()
        known = sys.modules.get("slime.utils.types")
        self._sample_class = known.Sample if known else Sample

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """One score, or exception, for each rollout.

        Raises:
            RewardError: a score lacks reward_key, or a batched function returns another number of scores than samples.
        """
        samples = [sample_of(rollout, next(self._numbers), self._sample_class) for rollout in rollouts]
        scores = self._score_groups(samples) if self._is_batched else self._score_all(samples)
        return [self._value(score) for score in scores]

    def _score_all(self, given: Sequence[Any]) -> list[Any]:
        return self._run([partial(self._call, one) for one in given])

    def _score_groups(self, samples: list[Any]) -> list[Any]:
        groups: dict[Any, list[int]] = {}
        for place, sample in enumerate(samples):
            groups.setdefault(sample.group_index, []).append(place)
        given = [[samples[place] for place in places] for places in groups.values()]
        found: list[Any] = [None] * len(samples)
        for places, scores in zip(groups.values(), self._score_all(given), strict=True):
            for place, score in zip(places, self._as_many(scores, len(places)), strict=True):
                found[place] = score
        return found

    def _as_many(self, scores: Any, number: int) -> list[Any]:
        if isinstance(scores, BaseException):
            return [scores] * number
        if isinstance(scores, str | bytes | Mapping) or not hasattr(scores, "__len__") or len(scores) != number:
            got = f"{len(scores)} scores" if hasattr(scores, "__len__") else type(scores).__name__
            raise RewardError(
                f"{self.name} must return one score for each sample of a prompt (reward.batched = true), "
                f"got {got} for {number} samples."
            )
        return list(scores)

    async def _call(self, given: Any) -> Any:
        result = self._function(self._args, given)
        return await result if inspect.isawaitable(result) else result

    def _value(self, score: Any) -> Any:
        if self._reward_key is None or score is None or isinstance(score, BaseException):
            return score
        if not isinstance(score, Mapping) or self._reward_key not in score:
            got = f"one with {', '.join(map(str, score))}" if isinstance(score, Mapping) else repr(score)
            raise RewardError(
                f"{self.name} must return a dict with {self._reward_key!r} (reward.reward_key), got {got}."
            )
        return score[self._reward_key]
