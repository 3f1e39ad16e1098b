"""GDPO: several rewards, each normalised in its group before they are added."""

import torch
from torch import Tensor

from strop.ops.advantages.group import group_advantages
from strop.ops.advantages.whiten import whiten


def gdpo(
    reward_parts: Tensor, group_ids: Tensor, part_weights: Tensor | None = None, *, std_eps: float = 1e-6
) -> Tensor:
    """GDPO: every reward is normalised in its group, then they are added and whitened over the batch.

        A_i = whiten(sum_k w_k (R_ik - mean_gk) / (std_gk + std_eps))

    so that a reward of small spread is not drowned by one of large spread. Source: Liu et al. 2026 (arXiv:2601.05242) eq. 4
    to 6. Departure: (1) parts whose group has equal rewards give exactly 0.

    Args: reward_parts N x K, group_ids N int, part_weights K or None for 1 each (a weight on the rewards themselves would go
    with the division), std_eps in units of reward. Returns N. Raises ValueError for shapes that do
    not fit and rewards that are not finite.

    >>> parts = torch.tensor([[1.0, 300.0], [0.0, 100.0], [1.0, 300.0], [0.0, 100.0]])
    >>> [round(x, 3) for x in gdpo(parts, torch.tensor([0, 0, 0, 0])).tolist()]
    [0.866, -0.866, 0.866, -0.866]
    """
    if reward_parts.dim() != 2 or reward_parts.shape[1] == 0:
        raise ValueError(f"reward_parts must be N x K with K >= 1, got {tuple(reward_parts.shape)}.")
    if part_weights is not None and part_weights.shape != reward_parts.shape[1:]:
        raise ValueError(
            f"part_weights must be one for each of {reward_parts.shape[1]} rewards, got {tuple(part_weights.shape)}."
        )
    normalized = torch.stack([group_advantages(part, group_ids, std_eps=std_eps) for part in reward_parts.unbind(1)])
    total = (normalized if part_weights is None else part_weights.to(normalized)[:, None] * normalized).sum(0)
    return whiten(total, torch.ones_like(total, dtype=torch.bool))
