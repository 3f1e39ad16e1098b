"""GRPO's advantage with rewards for the steps of a response."""

import torch
from torch import Tensor

from strop.ops.advantages.returns import discounted_returns
from strop.ops.advantages.statistics import GroupStatistics


def process_advantages(
    token_rewards: Tensor,
    step_mask: Tensor,
    group_ids: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    normalize_std: bool = True,
    std_eps: float = 1e-6,
) -> Tensor:
    """GRPO with process supervision: step rewards normalised over the group, and summed from the token's step on.

        n_s = (r_s - mean_g) / (std_g + std_eps)     over all steps s of the group, std_g with K - 1 in the denominator
        A_t = sum of n_s over the steps of its rollout that end at t or later

    Source: DeepSeekMath (arXiv:2402.03300) section 4.1.3. Departures: (1) step rewards that are equal in the whole group
    give exactly 0; (2) so does a group of which one rollout alone has steps, which would be its own baseline; (3) with
    normalize_std = False nothing is divided, as in Dr.GRPO. A rollout with one step, at its last token, gets the advantage
    of `group_advantages`.

    Args:
        token_rewards: T, what a token earns; read at trainable steps alone. No gradient.
        step_mask: T, bool, True where a step ends: at tokens that were given a reward, if only 0.
        group_ids: S, int, entry s of sequence id s.
        loss_mask: T, bool.
        sequence_ids: T, int, the tokens of a sequence in their order.
        normalize_std: divide by the deviation of the group's step rewards.
        std_eps: added to the deviation, in units of reward.

    Returns:
        T, float64, 0 where masked.

    Raises:
        ValueError: shapes differ, or the reward of a step is not finite.

    >>> rewards, steps = torch.tensor([0.0, 1.0, 0.0, -1.0]), torch.ones(4, dtype=torch.bool)
    >>> ids = torch.tensor([0, 0, 1, 1])
    >>> process_advantages(rewards, steps, torch.tensor([5, 5]), steps, ids, normalize_std=False).tolist()
    [1.0, 1.0, -1.0, -1.0]
    """
    if not token_rewards.shape == step_mask.shape == loss_mask.shape == sequence_ids.shape:
        raise ValueError(
            f"token_rewards, step_mask, loss_mask and sequence_ids must share a shape, got {tuple(token_rewards.shape)}, "
            f"{tuple(step_mask.shape)}, {tuple(loss_mask.shape)} and {tuple(sequence_ids.shape)}."
        )
    steps = step_mask & loss_mask
    rollouts = sequence_ids[steps]
    groups = GroupStatistics(token_rewards[steps].double(), group_ids[rollouts])
    normalized = groups.values - groups.mean[groups.index]
    if normalize_std:
        normalized = normalized / (groups.std + std_eps)[groups.index]
    pairs = torch.stack([groups.index, rollouts]).unique(dim=1)  # each rollout with steps once
    num_rollouts = torch.bincount(pairs[0], minlength=groups.num_groups)
    normalized = torch.where(num_rollouts[groups.index] > 1, normalized, torch.zeros_like(normalized))
    found = torch.zeros(token_rewards.shape, dtype=torch.float64, device=token_rewards.device)
    found[steps] = groups.result(normalized)
    return discounted_returns(found, loss_mask, sequence_ids, gamma=1.0)
