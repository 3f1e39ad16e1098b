"""What the answers to a set of held-out prompts say: mean reward, pass@k and maj@k, each with a 95 % interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from strop.config.evaluation import pass_ks
from strop.types import Rollout

_Z = 1.959964  # 97.5 % of a normal distribution lie below it
AnswerKey = Callable[[Rollout], Hashable | None]


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    num_prompts: int


@dataclass(frozen=True)
class Score:
    """What one way of answering (greedy, or by sampling) a set of prompts is worth."""

    reward: float
    low: float  # 95 % confidence interval of the reward
    high: float
    response_tokens: float
    truncated: float
    num_prompts: int
    num_excluded: int  # answers without a reward, left out
    num_errors: int  # answers on which the scorer failed, whatever on_error made of them
    reward_of: dict[str, float]  # by source, where the data names sources
    pass_at: dict[int, Estimate] = field(default_factory=dict)  # by k, of sampled answers
    maj_at: dict[int, Estimate] = field(default_factory=dict)  # at the number of samples


def score_answers(
    rollouts: Sequence[Rollout],
    *,
    num_samples: int,
    success_reward: float,
    answer_key: AnswerKey,
    num_errors: int = 0,
) -> Score:
    """The score of scored answers; those without a reward are counted and left out.

    Args:
        rollouts: in any order; answers to one prompt share `prompt.row`.
        num_samples: sampled answers to each prompt; 0 for greedy ones, which have no pass@k and maj@k.
        success_reward: an answer that earns at least so much is a success.
        answer_key: which final answer a rollout gives, for maj@k.
        num_errors: answers on which the scorer failed.
    """
    groups: dict[int, list[Rollout]] = {}
    for r in sorted(rollouts, key=lambda r: r.sample):
        if r.reward is not None:
            groups.setdefault(r.prompt.row, []).append(r)
    means = {row: _mean([r.reward or 0.0 for r in group]) for row, group in groups.items()}
    reward = estimate(list(means.values()))
    successes = {row: [(r.reward or 0.0) >= success_reward for r in group] for row, group in groups.items()}
    passes = {k: _pass_estimate(list(successes.values()), k) for k in pass_ks(num_samples)}
    majorities = [  # as pass@k, over the prompts of which enough answers are scored
        majority_success(group, successes[row], answer_key)
        for row, group in groups.items()
        if len(group) >= num_samples
    ]
    return Score(
        reward=reward.value,
        low=reward.low,
        high=reward.high,
        response_tokens=sum(r.num_response_tokens for r in rollouts) / max(len(rollouts), 1),
        truncated=sum(r.finish_reason == "length" for r in rollouts) / max(len(rollouts), 1),
        num_prompts=reward.num_prompts,
        num_excluded=sum(r.reward is None for r in rollouts),
        num_errors=num_errors,
        reward_of=_by_source(groups, means),
        pass_at=passes,
        maj_at={num_samples: estimate(majorities)} if num_samples > 1 else {},
    )


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement from the n at hand, is a success.

    pass@k = 1 - C(n - c, k) / C(n, k)

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1: the unbiased estimate of 1 - (1 - p)^k.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    assert 1 <= k <= num_samples, (k, num_samples)
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def _pass_estimate(successes: Sequence[Sequence[bool]], k: int) -> Estimate:
    """Over the prompts with k scored answers or more."""
    return estimate([pass_at_k(len(group), sum(group), k) for group in successes if len(group) >= k])


def majority_success(group: Sequence[Rollout], successes: Sequence[bool], answer_key: AnswerKey) -> float:
    """1 if the final answer that most samples share is a success, else 0.

    Among answers that equally many share, that whose first sample came earliest is taken. Samples without a final answer have
    no vote; where none has one, 0. An answer is as good as its first sample.
    """
    first: dict[Hashable, bool] = {}
    votes: Counter[Hashable] = Counter()
    for rollout, success in zip(group, successes, strict=True):
        key = answer_key(rollout)
        if key is not None:
            votes[key] += 1
            first.setdefault(key, success)
    if not votes:
        return 0.0
    winner = max(votes, key=lambda key: votes[key])  # of equal ones the first, in the order of insertion
    return float(first[winner])


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one value a prompt, with a 95 % interval: prompts are the independent units.

    Wilson's interval where every value is 0 or 1, which keeps its width at 0 % and 100 %; else mean +- 1.96 standard errors,
    kept within [0, 1] where all values are.
    No values give NaN; a single one that is neither 0 nor 1 has no interval (infinite).
    """
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = _mean(values)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *_wilson(mean, count), count)
    if count == 1:
        return Estimate(mean, -math.inf, math.inf, count)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    margin = _Z * math.sqrt(variance / count)
    low, high = mean - margin, mean + margin
    if all(0 <= value <= 1 for value in values):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high, count)


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson 1927: the shares p with |share - p| <= z sqrt(p (1 - p) / n)."""
    square = _Z * _Z / count
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _by_source(groups: Mapping[int, Sequence[Rollout]], means: Mapping[int, float]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row, group in groups.items():
        source = group[0].prompt.source
        if source is not None:
            found.setdefault(source, []).append(means[row])
    return {source: _mean(values) for source, values in sorted(found.items())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
