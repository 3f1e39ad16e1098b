"""From the options of a reward to its scorer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from strop.config.sampling import (
    CodeRewardOptions,
    DatasetRewardOptions,
    ExactRewardOptions,
    FunctionRewardOptions,
    MathRewardOptions,
    NoRewardOptions,
    NumberRewardOptions,
    RewardOptions,
    SlimeRewardOptions,
)
from strop.rewards.code import CodeScore
from strop.rewards.code_tests import code_label
from strop.rewards.dataset import DatasetScore
from strop.rewards.exact import exact_label, exact_score
from strop.rewards.function import is_only_here, source_file
from strop.rewards.jail import Limits
from strop.rewards.maths import MathScore, math_label
from strop.rewards.number import number_label, number_score
from strop.rewards.pool import Pool
from strop.rewards.scorer import Scorer, Unscored, one_by_one
from strop.rewards.user_function import FunctionSpec, OwnProcess
from strop.types import RewardError, Rollout

logger = logging.getLogger("strop")


def make_scorer(options: RewardOptions) -> Scorer:
    """Build the scorer that the options ask for.

    Args:
        options: the table `reward` of the config.

    Returns:
        A scorer, ready to use. It may hold processes: close it when it is not needed any more.

    Raises:
        RewardError: reward.function cannot be loaded, or is not what the options want.

    >>> make_scorer(ExactRewardOptions()).name
    'exact'
    """
    match options:
        case ExactRewardOptions():
            return _own_scorer(lambda rollout: exact_score(rollout, strip=options.strip), "exact")
        case NumberRewardOptions():
            return _own_scorer(lambda rollout: number_score(rollout, tolerance=options.tolerance), "number")
        case MathRewardOptions():
            maths = MathScore()
            return _own_scorer(maths, "math", metrics=maths.take_metrics)
        case CodeRewardOptions():
            code = _code_score(options)
            return Scorer(code, "code", metrics=code.take_metrics, close=code.close, ask_ahead=code)
        case DatasetRewardOptions():
            return _own_scorer(DatasetScore(), "dataset", options.on_error)
        case FunctionRewardOptions() | SlimeRewardOptions():
            return _users_scorer(options)
        case NoRewardOptions():
            return Unscored()


def _code_score(options: CodeRewardOptions) -> CodeScore:
    limits = {name: value for name, value in options.bound().items() if name not in ("score", "isolation")}
    return CodeScore(Limits(**limits), options.score, options.isolation)


def _own_scorer(score: Callable[[Rollout], Any], name: str, *more: Any, **metrics: Any) -> Scorer:
    return Scorer(one_by_one(score, name), name, *more, **metrics)


def _users_scorer(options: FunctionRewardOptions | SlimeRewardOptions) -> Scorer:
    stops, in_workers = options.on_error == "fail", options.num_workers != 0
    if in_workers and is_only_here(options.function):
        logger.warning(
            "%s can be loaded by no other process, and is called in that of the run, where reward.timeout_s and "
            "reward.memory_limit_mb do not hold. Put it into a file of its own.",
            options.function,
        )
        in_workers = False
    ahead = None
    if in_workers:
        ask = ahead = Pool(_spec(options), num_workers=options.num_workers, stops_at_failure=stops)
    else:
        ask = OwnProcess(_spec(options, has_limits=False), stops_at_failure=stops)
    try:
        _check_async(options, is_async=ask.is_async)
    except RewardError:
        ask.close()
        raise
    return Scorer(ask, options.function, options.on_error, has_limits=in_workers, close=ask.close, ask_ahead=ahead)


def _check_async(options: FunctionRewardOptions | SlimeRewardOptions, *, is_async: bool) -> None:
    """What the config alone cannot tell."""
    if not is_async and options.max_concurrent != type(options).model_fields["max_concurrent"].default:
        raise RewardError(
            f"reward.max_concurrent cannot act: {options.function} is no async function, and is called once at a time in each "
            "worker. Leave it out, set reward.num_workers, or write async def."
        )
    if is_async and (options.num_workers or 0) > 1:
        raise RewardError(
            f"reward.num_workers must be 0 or 1 for an async function, got {options.num_workers}: the calls of "
            f"{options.function} share one event loop. reward.max_concurrent says how many run at once."
        )


def _spec(options: FunctionRewardOptions | SlimeRewardOptions, *, has_limits: bool = True) -> FunctionSpec:
    spec = FunctionSpec(
        kind=options.kind,
        function=options.function,
        batched=options.batched,
        per=options.per,
        weights=options.weights,
        max_concurrent=options.max_concurrent,
    )
    if isinstance(options, SlimeRewardOptions):
        spec = replace(spec, reward_key=options.reward_key, args=options.args)
    if has_limits:
        limits = {"timeout_s": options.call_timeout_s, "memory_limit_mb": options.memory_limit_mb}
        spec = replace(spec, **limits, is_seeded=True)
    return spec


def label_check(options: RewardOptions) -> Callable[[Any], object] | None:
    """What raises a ValueError for a label that this reward cannot compare with; None if it takes any label.

    So that a wrong label is found when the data is read, and not at the step that first samples its prompt.
    """
    return {"exact": exact_label, "number": number_label, "math": math_label, "code": code_label}.get(options.kind)


def scorer_source(options: RewardOptions) -> str | None:
    """A fingerprint of the file that `reward.function` is in; None for strop's own scorers and what has no file."""
    if not isinstance(options, FunctionRewardOptions | SlimeRewardOptions):
        return None
    file = source_file(options.function)
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
