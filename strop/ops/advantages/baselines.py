"""Advantages that differ from GRPO's in the baseline or in what they divide by."""

import torch
from torch import Tensor

from strop.ops.advantages.statistics import GroupStatistics


def rloo(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None = None) -> Tensor:
    """Leave-one-out: the reward's distance from the mean of the others of its group.

        A_i = R_i - (sum_g - R_i) / (n - 1) = n / (n - 1) (R_i - mean_g)

    Source: Ahmadian et al. 2024 (arXiv:2402.14740) eq. 8. Departure: (1) a group of one gives 0. Arguments, result and
    errors as in `group_advantages`.

    >>> rloo(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0])).tolist()
    [0.75, -0.75, 0.0]
    """
    groups = GroupStatistics(rewards, group_ids, rollout_ids)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    return groups.result((groups.values - groups.mean[groups.index]) * factor[groups.index])


def opo(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """OPO: the baseline that makes the variance smallest, each reward weighted by the length of its response.

        A_i = R_i - sum_j(l_j R_j) / sum_j(l_j)        j over the group

    Source: Hao et al. 2025 (arXiv:2505.23585) eq. 7. Departure: (1) a group of equal rewards gives exactly 0.

    Args: rewards N, group_ids N int, lengths N: trainable tokens of each rollout, >= 1. Returns N. Raises ValueError for
    shapes that differ, rewards that are not finite and lengths that are not positive.

    >>> [round(x, 4) for x in opo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([3, 1])).tolist()]
    [0.25, -0.75]
    """
    if lengths.shape != rewards.shape or not (lengths > 0).all():
        raise ValueError(
            f"lengths must be positive and as many as rewards, {len(rewards)}, got {tuple(lengths.shape)}."
        )
    groups = GroupStatistics(rewards, group_ids)
    weights = lengths.double()
    baseline = groups.sum(weights * groups.values) / groups.sum(weights)
    return groups.result(groups.values - baseline[groups.index])


def maxrl(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None = None, *, mean_eps: float = 1e-6) -> Tensor:
    """MaxRL: the reward's distance from the mean of its group, in units of that mean.

        A_i = (R_i - mean_g) / (mean_g + mean_eps)

    For rewards of 0 and 1 it follows the gradient of the log-likelihood of success up to the order that the group allows.
    Source: Tajwar et al. 2026 (arXiv:2602.02710) eq. 8. Arguments, result and errors as in `group_advantages`; rewards >= 0.

    >>> [round(x, 3) for x in maxrl(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0])).tolist()]
    [1.0, -1.0, 0.0]
    """
    if not mean_eps > 0:
        raise ValueError(f"mean_eps must be > 0, got {mean_eps}.")
    if (rewards < 0).any():
        raise ValueError(f"rewards must be >= 0 for maxrl, got {float(rewards.min())}: it divides by their mean.")
    groups = GroupStatistics(rewards, group_ids, rollout_ids)
    distance = groups.values - groups.mean[groups.index]
    return groups.result(distance / (groups.mean + mean_eps)[groups.index])


def pass_at_k(rewards: Tensor, group_ids: Tensor, *, k: int, success_reward: float = 1.0) -> Tensor:
    """Pass@k training: the advantage of a rollout within all sets of k from its group, in closed form.

    With n rollouts of a group, of which m fail (reward below success_reward):

        mean = 1 - C(m, k) / C(n, k),    std = sqrt(mean (1 - mean))
        A = (1 - mean) / std                                      where it succeeds
        A = (1 - mean - C(m - 1, k - 1) / C(n - 1, k - 1)) / std  where it fails

    Source: Chen et al. 2025 (arXiv:2508.10751) eq. 12 to 14. Departures: (1) where every set passes, or none, it is 0;
    (2) a group of k rollouts or fewer, which has one set or none, gives 0, as a group of one does for k = 1: rollouts that
    leave a group because they have no score do not stop a run.

    Args: rewards N, group_ids N int, k: size of a set, >= 1, success_reward. Returns N. Raises ValueError for a k below 1,
    and as `group_advantages`.

    >>> advantages = pass_at_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), k=2)
    >>> [round(x, 4) for x in advantages.tolist()]
    [1.0, -0.3333, -0.3333, -0.3333]
    """
    groups = GroupStatistics(rewards, group_ids)
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}.")
    fails = groups.values < success_reward
    failed, size = groups.sum(fails.double()), groups.size
    mean = 1 - _choose_ratio(failed, size, k)
    std = (mean * (1 - mean)).sqrt()
    safe = torch.where(std > 0, std, torch.ones_like(std))
    good = (1 - mean) / safe
    bad = (1 - mean - _choose_ratio(failed - 1, size - 1, k - 1)) / safe
    advantages = torch.where(fails, bad[groups.index], good[groups.index])
    # std is 0 in a group of k or fewer too: the ratio of its one set, or of none, is 0 or 1.
    return groups.result(torch.where((std > 0)[groups.index], advantages, torch.zeros_like(advantages)))


def _choose_ratio(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k), as a product that cannot overflow."""
    ratio = torch.ones_like(whole)
    for i in range(k):
        ratio = ratio * ((part - i).clamp(min=0) / (whole - i).clamp(min=1))
    return ratio
