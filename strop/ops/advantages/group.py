"""GRPO's advantage."""

from torch import Tensor

from strop.ops.advantages.statistics import GroupStatistics


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor | None = None,
    *,
    normalize_std: bool = True,
    std_eps: float = 1e-6,
) -> Tensor:
    """GRPO's advantage: the reward's distance from the mean of its group, in standard deviations of the group.

        A_i = (R_i - mean_g) / (std_g + std_eps)        std_g with n - 1 in the denominator
        A_i =  R_i - mean_g                             with normalize_std = False (Dr.GRPO)

    Sources: DeepSeekMath (arXiv:2402.03300) section 4.1.2; Dr.GRPO (arXiv:2503.20783) eq. 3. Departures: (1) a group whose
    rewards are all equal gives exactly 0, not a rounding error over std_eps; (2) a group of one gives 0.

    Args:
        rewards: N, finite; computed in float64 whatever comes in. No gradient.
        group_ids: N, int; equal ids form a group, in any order and of any sizes.
        rollout_ids: N, int, or None. Rows that share an id are parts of one rollout (with equal rewards) and count once.
        normalize_std: divide by the group's standard deviation.
        std_eps: added to the standard deviation, in units of reward.

    Returns:
        N, float32 or wider, as `rewards`.

    Raises:
        ValueError: shapes differ, or a reward is not finite.

    >>> import torch
    >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]), normalize_std=False).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    groups = GroupStatistics(rewards, group_ids, rollout_ids)
    distance = groups.values - groups.mean[groups.index]
    if normalize_std:
        distance = distance / (groups.std + std_eps)[groups.index]
    return groups.result(distance)
