"""Advantages from rewards: one number per rollout, computed over whole groups before anything is cut."""

import torch
from torch import Tensor


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

    >>> group_advantages(torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]), normalize_std=False).tolist()
    [-1.0, 1.0, 0.0, 0.0]
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards and group_ids must be vectors of one length, got {tuple(rewards.shape)} and {tuple(group_ids.shape)}."
        )
    if rollout_ids is not None and rollout_ids.shape != rewards.shape:
        raise ValueError(f"rollout_ids must be as long as rewards, {len(rewards)}, got {tuple(rollout_ids.shape)}.")
    if not rewards.isfinite().all():
        raise ValueError("rewards must be finite. Leave rollouts without a score out before advantages are computed.")
    values = rewards.detach().double()
    _, group = group_ids.unique(return_inverse=True)
    counted = (
        _first_of_each(group, rollout_ids) if rollout_ids is not None else torch.ones_like(group, dtype=torch.bool)
    )
    num_groups = int(group.max()) + 1 if group.numel() else 0

    def per_group(numbers: Tensor) -> Tensor:
        total = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
        return total.index_add_(0, group[counted], numbers[counted])

    size = per_group(torch.ones_like(values))
    mean = per_group(values) / size
    distance = values - mean[group]
    low = torch.full_like(mean, torch.inf).scatter_reduce_(0, group, values, "amin")
    high = torch.full_like(mean, -torch.inf).scatter_reduce_(0, group, values, "amax")
    if normalize_std:
        std = (per_group(distance.square()) / (size - 1).clamp(min=1)).sqrt()
        distance = distance / (std + std_eps)[group]
    distance = torch.where((low == high)[group], torch.zeros_like(distance), distance)
    return distance.to(
        torch.promote_types(rewards.dtype, torch.float32) if rewards.is_floating_point() else torch.float32
    )


def _first_of_each(group: Tensor, rollout_ids: Tensor) -> Tensor:
    """True at the first row of every rollout of a group."""
    _, inverse = torch.stack([group, rollout_ids]).unique(dim=1, return_inverse=True)
    rows = torch.arange(group.numel(), device=group.device)
    first = torch.full((int(inverse.max()) + 1 if rows.numel() else 0,), rows.numel(), device=group.device)
    first = first.scatter_reduce_(0, inverse, rows, "amin")
    mask = torch.zeros_like(group, dtype=torch.bool)
    mask[first] = True
    return mask
