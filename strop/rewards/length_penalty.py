"""What a response pays for its length, after it was scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.config.filtering import LengthPenaltyOptions, NoLengthPenaltyOptions, SoftOverlongOptions
from strop.types import Metric, RewardError, Rollout, StepMetrics

PART = "length_penalty"  # its name among named rewards


def soft_overlong(num_tokens: int, *, max_response_tokens: int, buffer_tokens: int, penalty_coef: float) -> float:
    """DAPO's soft overlong punishment.

        0                                         if n <= L - b
        penalty_coef ((L - b) - n) / b                    if L - b < n <= L
        -penalty_coef                                     if n > L

    Source: DAPO, arXiv:2503.14476, eq. 13, times penalty_coef.

    Args:
        num_tokens: n, tokens of the response, the end token included.
        max_response_tokens: L, the length limit.
        buffer_tokens: b, over how many tokens before the limit the penalty grows.
        penalty_coef: penalty at the limit.

    >>> [soft_overlong(n, max_response_tokens=20, buffer_tokens=4, penalty_coef=1.0) for n in (16, 17, 18, 20, 21)]
    [0.0, -0.25, -0.5, -1.0, -1.0]
    """
    over = num_tokens - (max_response_tokens - buffer_tokens)
    return -penalty_coef * min(max(over, 0), buffer_tokens) / buffer_tokens if over > 0 else 0.0


def per_token(num_tokens: int, *, target_tokens: int, penalty_coef: float) -> float:
    """A price for each token above a target.

        -penalty_coef max(n - target, 0)

    Source: L1, arXiv:2503.04697, eq. 1 (LCPO-exact). Departures: (1) a response shorter than the target costs nothing;
    (2) the target is the run's, not each prompt's.

    >>> [per_token(n, target_tokens=5, penalty_coef=0.5) for n in (4, 5, 7)]
    [0.0, 0.0, -1.0]
    """
    return -penalty_coef * (num_tokens - target_tokens) if num_tokens > target_tokens else 0.0


def penalise(
    rollouts: Sequence[Rollout], options: LengthPenaltyOptions, *, max_response_tokens: int
) -> tuple[list[Rollout], StepMetrics]:
    """Take the penalty from each scored rollout's reward. Among named rewards it is one of its own.

    Returns:
        The rollouts in their order, and the metrics `length_penalty` and `reward/after_penalty`; without a penalty the
        rollouts as they are and no metrics.

    Raises:
        RewardError: a scorer has a named reward of this name.
    """
    if isinstance(options, NoLengthPenaltyOptions):
        return list(rollouts), {}
    found = [r if r.reward is None else _paid(r, _penalty(r, options, max_response_tokens)) for r in rollouts]
    scored = [r for r in found if r.reward is not None]
    return found, {
        "length_penalty": Metric.mean(sum(r.length_penalty or 0.0 for r in scored), len(scored)),
        "reward/after_penalty": Metric.mean(sum(r.reward or 0.0 for r in scored), len(scored)),
    }


def _penalty(rollout: Rollout, options: LengthPenaltyOptions, limit: int) -> float:
    length = rollout.num_response_tokens
    if isinstance(options, SoftOverlongOptions):
        buffer = options.buffer_of(limit)
        return soft_overlong(length, max_response_tokens=limit, buffer_tokens=buffer, penalty_coef=options.penalty_coef)
    assert options.kind == "per_token", options
    return per_token(length, target_tokens=options.target_tokens, penalty_coef=options.penalty_coef)


def _paid(rollout: Rollout, penalty: float) -> Rollout:
    assert rollout.reward is not None, rollout
    parts = rollout.reward_parts
    if parts and PART in parts:
        raise RewardError(
            f"named rewards must not be called {PART} with length_penalty.kind set: that is the penalty's own name, and the "
            f"scorer gave it to prompt row {rollout.prompt.row}. Name yours otherwise."
        )
    return replace(
        rollout,
        reward=rollout.reward + penalty,
        reward_parts={**parts, PART: penalty} if parts else parts,
        length_penalty=penalty,
    )
