"""From the options of a reward to its scorer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

from strop.compat.slime import SlimeReward, provide_slime_types
from strop.config.sampling import (
    DatasetRewardOptions,
    ExactRewardOptions,
    FunctionRewardOptions,
    MathRewardOptions,
    NoRewardOptions,
    NumberRewardOptions,
    RewardOptions,
    SlimeRewardOptions,
)
from strop.rewards.concurrent import is_async, run_all
from strop.rewards.dataset import DatasetScore
from strop.rewards.exact import exact_label, exact_score
from strop.rewards.function import load_function, source_file
from strop.rewards.maths import MathScore, math_label
from strop.rewards.number import number_label, number_score
from strop.rewards.scorer import Scorer, Unscored
from strop.types import RewardError, Rollout


def make_scorer(options: RewardOptions) -> Scorer:
    """Build the scorer that the options ask for.

    Args:
        options: the table `reward` of the config.

    Returns:
        A scorer, ready to use.

    Raises:
        RewardError: reward.function cannot be loaded, or is not what the options want.

    >>> make_scorer(ExactRewardOptions()).name
    'exact'
    """
    match options:
        case ExactRewardOptions():
            return Scorer(lambda rollout: exact_score(rollout, strip=options.strip), "exact")
        case NumberRewardOptions():
            score = lambda rollout: number_score(rollout, tolerance=options.tolerance)  # noqa: E731
            return Scorer(score, "number")
        case MathRewardOptions():
            maths = MathScore()
            return Scorer(maths, "math", metrics=maths.take_metrics)
        case DatasetRewardOptions():
            return Scorer(DatasetScore(), "dataset", options.on_error)
        case FunctionRewardOptions():
            return _function_scorer(options)
        case SlimeRewardOptions():
            return _foreign_scorer(options, _slime_reward(options), is_batched=True)
        case NoRewardOptions():
            return Unscored()


def _function_scorer(options: FunctionRewardOptions) -> Scorer:
    function, limit = load_function(options.function), options.max_concurrent
    if not is_async(function):
        if limit != type(options).model_fields["max_concurrent"].default:
            raise RewardError(
                f"reward.max_concurrent cannot act: {options.function} is no async function, and is called once at a time. "
                "Leave it out, or write async def."
            )
        return _foreign_scorer(options, function, is_batched=options.batched)
    if options.batched:
        return _foreign_scorer(options, lambda rollouts: _finished(function, rollouts), is_batched=True)
    return _foreign_scorer(options, function, max_concurrent=limit)


def _finished(function: Callable[..., Any], rollouts: list[Rollout]) -> Any:
    """What an async function returns for all rollouts at once."""
    (found,) = run_all([partial(function, rollouts)], max_concurrent=1)
    if isinstance(found, BaseException):
        raise found
    return found


def _foreign_scorer(
    options: FunctionRewardOptions | SlimeRewardOptions, score: Callable[[Any], Any], **more: Any
) -> Scorer:
    return Scorer(score, options.function, options.on_error, per=options.per, weights=options.weights, **more)


def _slime_reward(options: SlimeRewardOptions) -> SlimeReward:
    provide_slime_types()
    return SlimeReward(
        load_function(options.function),
        options.function,
        options.args,
        run=partial(run_all, max_concurrent=options.max_concurrent),
        reward_key=options.reward_key,
        is_batched=options.batched,
    )


def label_check(options: RewardOptions) -> Callable[[Any], object] | None:
    """What raises a ValueError for a label that this reward cannot compare with; None if it takes any label.

    So that a wrong label is found when the data is read, and not at the step that first samples its prompt.
    """
    return {"exact": exact_label, "number": number_label, "math": math_label}.get(options.kind)


def scorer_source(options: RewardOptions) -> str | None:
    """A fingerprint of the file that `reward.function` is in; None for strop's own scorers and what has no file."""
    if not isinstance(options, FunctionRewardOptions | SlimeRewardOptions):
        return None
    file = source_file(options.function)
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
