"""From the options of a reward to its scorer."""

from __future__ import annotations

from strop.config.sampling import (
    DatasetRewardOptions,
    ExactRewardOptions,
    FunctionRewardOptions,
    MathRewardOptions,
    NumberRewardOptions,
    RewardOptions,
)
from strop.rewards.dataset import DatasetScore
from strop.rewards.exact import exact_score
from strop.rewards.function import load_function
from strop.rewards.maths import MathScore
from strop.rewards.number import number_score
from strop.rewards.scorer import Scorer


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
            return Scorer(lambda rollout: exact_score(rollout, strip=options.strip), "exact", options.on_error)
        case NumberRewardOptions():
            score = lambda rollout: number_score(rollout, tolerance=options.tolerance)  # noqa: E731
            return Scorer(score, "number", options.on_error)
        case MathRewardOptions():
            maths = MathScore()
            return Scorer(maths, "math", options.on_error, metrics=maths.take_metrics)
        case DatasetRewardOptions():
            return Scorer(DatasetScore(), "dataset", options.on_error)
        case FunctionRewardOptions():
            function = load_function(options.function)
            return Scorer(function, options.function, options.on_error, is_batched=options.batched)
