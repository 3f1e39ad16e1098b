"""From the options of a reward to its scorer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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
from strop.rewards.dataset import DatasetScore
from strop.rewards.exact import exact_label, exact_score
from strop.rewards.function import load_function, source_file
from strop.rewards.maths import MathScore, math_label
from strop.rewards.number import number_label, number_score
from strop.rewards.scorer import Scorer, Unscored


def make_scorer(options: RewardOptions) -> Scorer:
    """Build the scorer that the options ask for.

    Args:
        options: the table `reward` of the config.

    Returns:
        A scorer, ready to use.

    Raises:
        RewardError: reward.function cannot be loaded.

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
            function = load_function(options.function)
            return Scorer(function, options.function, options.on_error, is_batched=options.batched)
        case SlimeRewardOptions():
            return Scorer(_slime_reward(options), options.function, options.on_error, is_batched=True)
        case NoRewardOptions():
            return Unscored()


def _slime_reward(options: SlimeRewardOptions) -> SlimeReward:
    provide_slime_types()
    function, name = load_function(options.function), options.function
    return SlimeReward(function, name, options.args, reward_key=options.reward_key, is_batched=options.batched)


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
