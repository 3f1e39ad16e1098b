"""Means and deviations over groups of rollouts, by id, in any order and of any sizes."""

import torch
from torch import Tensor


class GroupStatistics:
    """Rewards in float64 and their groups' statistics, each rollout counted once.

    Args:
        rewards: N, finite.
        group_ids: N, int.
        rollout_ids: N, int, or None. Rows of one group that share an id are parts of one rollout and count once.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """

    def __init__(self, rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None = None) -> None:
        _check(rewards, group_ids, rollout_ids)
        self.values = rewards.detach().double()
        _, self.index = group_ids.unique(return_inverse=True)
        self.num_groups = int(self.index.max()) + 1 if self.index.numel() else 0
        self._counted = torch.ones_like(self.index, dtype=torch.bool)
        if rollout_ids is not None:
            self._counted = _first_of_each(self.index, rollout_ids)
        self._dtype = (
            torch.promote_types(rewards.dtype, torch.float32) if rewards.is_floating_point() else torch.float32
        )
        self.size = self.sum(torch.ones_like(self.values))
        self.mean = self.sum(self.values) / self.size

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum of one number per row over each group."""
        total = torch.zeros(self.num_groups, dtype=torch.float64, device=numbers.device)
        return total.index_add_(0, self.index[self._counted], numbers[self._counted].double())

    @property
    def std(self) -> Tensor:
        """Sample standard deviation of each group; 0 for a group of one."""
        distance = self.values - self.mean[self.index]
        return (self.sum(distance.square()) / (self.size - 1).clamp(min=1)).sqrt()

    @property
    def is_equal(self) -> Tensor:
        """True for a group whose rewards are all the same; a group of one is."""
        low = torch.full_like(self.mean, torch.inf).scatter_reduce_(0, self.index, self.values, "amin")
        high = torch.full_like(self.mean, -torch.inf).scatter_reduce_(0, self.index, self.values, "amax")
        return low == high

    def result(self, advantages: Tensor) -> Tensor:
        """Advantages of the rows: exactly 0 in groups of equal rewards, in at least float32."""
        return torch.where(self.is_equal[self.index], torch.zeros_like(advantages), advantages).to(self._dtype)


def _check(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor | None) -> None:
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards and group_ids must be vectors of one length, got {tuple(rewards.shape)} and {tuple(group_ids.shape)}."
        )
    if rollout_ids is not None and rollout_ids.shape != rewards.shape:
        raise ValueError(f"rollout_ids must be as long as rewards, {len(rewards)}, got {tuple(rollout_ids.shape)}.")
    if not rewards.isfinite().all():
        raise ValueError("rewards must be finite. Leave rollouts without a score out before advantages are computed.")


def _first_of_each(group: Tensor, rollout_ids: Tensor) -> Tensor:
    """True at the first row of every rollout of a group."""
    _, inverse = torch.stack([group, rollout_ids]).unique(dim=1, return_inverse=True)
    rows = torch.arange(group.numel(), device=group.device)
    first = torch.full((int(inverse.max()) + 1 if rows.numel() else 0,), rows.numel(), device=group.device)
    first = first.scatter_reduce_(0, inverse, rows, "amin")
    mask = torch.zeros_like(group, dtype=torch.bool)
    mask[first] = True
    return mask
