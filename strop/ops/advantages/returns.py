"""Advantages per token, from what a token and those after it earn."""

import torch
from torch import Tensor

from strop.ops.advantages.scan import discounted_sums
from strop.ops.advantages.statistics import GroupStatistics
from strop.ops.advantages.whiten import whiten


def discounted_returns(token_rewards: Tensor, loss_mask: Tensor, sequence_ids: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_next, over the trainable tokens of each sequence; masked tokens are not steps.

    Args: token_rewards T; loss_mask T, bool; sequence_ids T, int, the tokens of a sequence in their order; gamma in [0, 1].
    Returns T, float64, 0 where masked. Raises ValueError for shapes that differ and a gamma out of range.

    >>> rewards, mask = torch.tensor([0.0, 9.0, 1.0]), torch.tensor([True, False, True])
    >>> discounted_returns(rewards, mask, torch.zeros(3, dtype=torch.int64), gamma=0.5).tolist()
    [0.5, 0.0, 1.0]
    """
    if not token_rewards.shape == loss_mask.shape == sequence_ids.shape:
        raise ValueError(
            f"token_rewards, loss_mask and sequence_ids must share a shape, got {tuple(token_rewards.shape)}, "
            f"{tuple(loss_mask.shape)} and {tuple(sequence_ids.shape)}."
        )
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}.")
    found = torch.zeros(token_rewards.shape, dtype=torch.float64, device=token_rewards.device)
    steps = token_rewards[loss_mask].double()
    found[loss_mask] = discounted_sums(steps, sequence_ids[loss_mask], torch.full_like(steps, gamma))
    return found


def last_token_rewards(rewards: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Each sequence's reward on its last trainable token, 0 elsewhere. rewards S, entry s belongs to sequence id s.

    >>> last_token_rewards(torch.tensor([2.0]), torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.int64)).tolist()
    [0.0, 2.0, 0.0]
    """
    found = torch.zeros(loss_mask.shape, dtype=torch.float64, device=rewards.device)
    last = torch.full((len(rewards),), -1, dtype=torch.int64, device=rewards.device)
    places = loss_mask.nonzero().flatten()
    last.scatter_reduce_(0, sequence_ids[places], places, "amax")
    found[last[last >= 0]] = rewards[last >= 0].double()
    return found


def reinforce_plus_plus(token_rewards: Tensor, loss_mask: Tensor, sequence_ids: Tensor, *, gamma: float) -> Tensor:
    """REINFORCE++: discounted returns of what each token earns, whitened over the step's tokens.

        G_t = sum over trainable s >= t of gamma^(s - t) r_s,    A = whiten(G)

    Source: Hu et al. 2025 (arXiv:2501.03262) eq. 5 to 8, where r_s is the outcome at the last token (`last_token_rewards`)
    less each token's KL penalty. Departure: (1) any token may have earned a reward.

    Args: token_rewards T; loss_mask T, bool; sequence_ids T, int; gamma in [0, 1]. Returns T. Raises ValueError as
    `discounted_returns`.

    >>> mask, ids = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    >>> [round(x, 4) for x in reinforce_plus_plus(torch.tensor([1.0, 0.0]), mask, ids, gamma=1.0).tolist()]
    [0.7071, -0.7071]
    """
    returns = discounted_returns(token_rewards, loss_mask, sequence_ids, gamma=gamma)
    return whiten(returns, loss_mask).to(torch.promote_types(token_rewards.dtype, torch.float32))


def reinforce_plus_plus_baseline(
    rewards: Tensor, group_ids: Tensor, token_kl: Tensor, loss_mask: Tensor, sequence_ids: Tensor
) -> Tensor:
    """REINFORCE++ with a baseline: the distance from the group's mean less the token's KL penalty, whitened over the step.

        A = whiten(R - mean_g - token_kl_t)        over the step's trainable tokens

    Source: Hu et al. 2025 (arXiv:2501.03262) eq. 9 and 10.

    Args: rewards S and group_ids S int, entry s of sequence id s; token_kl T, the penalty with its coefficient, 0 for none;
    the rest as in `reinforce_plus_plus`.

    >>> mask, ids = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    >>> rewards, groups = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    >>> [round(x, 4) for x in reinforce_plus_plus_baseline(rewards, groups, torch.zeros(2), mask, ids).tolist()]
    [0.7071, -0.7071]
    """
    groups = GroupStatistics(rewards, group_ids)
    distance = groups.result(groups.values - groups.mean[groups.index])[sequence_ids]
    penalty = torch.where(loss_mask, token_kl.to(distance.dtype), torch.zeros_like(distance))
    return whiten(distance - penalty, loss_mask)
