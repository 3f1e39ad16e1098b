"""Runs slime's reward functions: `async def f(args, sample)`, or with a list of the samples of one prompt."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from strop.compat.slime.sample import Sample, SamplesOfAPrompt, sample_of
from strop.types import RewardError, Rollout


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
    """What a function of slime's is given for rollouts, and which scores it returned.

    Args:
        name: of the function, for messages.
        args: attributes of `args`, beside reward_key.
        reward_key: which value of a returned dict is the reward; None leaves a dict as named rewards.
        is_batched: the function takes the samples of one prompt and returns as many scores (slime's --group-rm).
    """

    def __init__(
        self, name: str, args: Mapping[str, Any], *, reward_key: str | None = None, is_batched: bool = False
    ) -> None:
        self.name, self._reward_key, self._is_batched = name, reward_key, is_batched
        self._args = SlimeArgs({"reward_key": reward_key, **args})
        known = sys.modules.get("slime.utils.types")
        self._sample_class = known.Sample if known else Sample

    def arguments(self, numbered: Sequence[tuple[int, Rollout]]) -> tuple[Any, Any]:
        """`args`, and the sample or the samples; each rollout comes with its number among all that are scored."""
        samples = [sample_of(rollout, number, self._sample_class) for number, rollout in numbered]
        return self._args, SamplesOfAPrompt(samples) if self._is_batched else samples[0]

    def values(self, returned: Any, number: int) -> list[Any]:
        """One score, or exception, for each of a number of rollouts.

        Raises:
            RewardError: a score lacks reward_key, or a batched function returns another number of scores than samples.
        """
        return [self._value(score) for score in (self._as_many(returned, number) if self._is_batched else [returned])]

    def _as_many(self, scores: Any, number: int) -> list[Any]:
        if isinstance(scores, str | bytes | Mapping) or not hasattr(scores, "__len__") or len(scores) != number:
            got = f"{len(scores)} scores" if hasattr(scores, "__len__") else type(scores).__name__
            raise RewardError(
                f"{self.name} must return one score for each sample of a prompt (reward.batched = true), "
                f"got {got} for {number} samples."
            )
        return list(scores)

    def _value(self, score: Any) -> Any:
        if score is None or isinstance(score, BaseException):
            return score
        if self._reward_key is None:
            return self._named(score)
        if not isinstance(score, Mapping) or self._reward_key not in score:
            got = f"one with {', '.join(map(str, score))}" if isinstance(score, Mapping) else repr(score)
            raise RewardError(
                f"{self.name} must return a dict with {self._reward_key!r} (reward.reward_key), got {got}."
            )
        return score[self._reward_key]

    def _named(self, score: Any) -> Any:
        """A score, of which each value of a dict is a reward, since no key says which one is."""
        texts = (
            [str(name) for name, value in score.items() if isinstance(value, str)] if isinstance(score, Mapping) else []
        )
        if texts:
            numbers = [str(name) for name in score if str(name) not in texts]
            one_of = f"; set it to the one that is: {', '.join(numbers)}" if numbers else ""
            raise RewardError(
                f"reward.reward_key must name the reward where {self.name} returns text beside it, got a dict whose "
                f"{', '.join(texts)} {'is' if len(texts) == 1 else 'are'} text{one_of}."
            )
        return score
