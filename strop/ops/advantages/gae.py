"""Generalised advantage estimation: advantages per token from rewards per token and a critic's values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.ops.advantages.scan import discounted_sums, next_values
from strop.ops.advantages.whiten import whiten as whitened


class EstimatedAdvantages(NamedTuple):
    """Advantages [T] for the policy and returns [T], what the critic learns to foresee; both 0 where masked."""

    advantages: Tensor
    returns: Tensor


def gae(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float,
    lam: float,
    lam_value: float | None = None,
    length_adaptive_alpha: float | None = None,
    whiten: bool = False,
) -> EstimatedAdvantages:
    """GAE over the trainable tokens of each sequence; tokens that the policy did not write are not steps.

        d_t = r_t + gamma V_next - V_t            V_next: of the sequence's next trainable token, 0 after the last
        A_t = d_t + gamma lam A_next
        returns_t = V_t + A_t,                    with lam_value in place of lam, if it is given

    With length_adaptive_alpha, lam is 1 - 1 / (length_adaptive_alpha l), l the trainable tokens of the sequence.

    Sources: Schulman et al. 2016 (arXiv:1506.02438) eq. 16; a lambda of its own for the returns is VC-PPO's (Yuan et al.
    2025, arXiv:2503.01491) decoupled GAE, and the length-adaptive one VAPO's (Yue et al. 2025, arXiv:2504.05118) section
    4.2. Departures: (1) the length-adaptive lambda is never below 0, where sequences are shorter than 1 / alpha.

    Args:
        token_rewards: T, what each token earned.
        values: T, of the state from which token t is chosen: all tokens before it.
        loss_mask: T, bool, True = trainable.
        sequence_ids: T, int, the tokens of a sequence in their order.
        gamma: discount per step, in [0, 1].
        lam: 1 trusts what was earned, 0 the critic; in [0, 1].
        lam_value: lambda of the returns; None means that of the advantages.
        length_adaptive_alpha: > 0; None means that lam is used as it is.
        whiten: bring the advantages (not the returns) to mean 0 and deviation 1 over the trainable tokens.

    Returns:
        EstimatedAdvantages, in at least float32, without gradient.

    Raises:
        ValueError: shapes differ, or an option is out of its range.

    >>> rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.4, 0.6])
    >>> found = gae(rewards, values, torch.ones(3).bool(), torch.zeros(3).long(), gamma=1.0, lam=0.95)
    >>> [[round(x, 3) for x in row.tolist()] for row in found]
    [[0.751, 0.58, 0.4], [0.951, 0.98, 1.0]]
    """
    _check(token_rewards, values, loss_mask, sequence_ids)
    for name, number in (("gamma", gamma), ("lam", lam), ("lam_value", lam if lam_value is None else lam_value)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {number}.")
    ids = sequence_ids[loss_mask]
    value = values.detach()[loss_mask].double()
    surprise = token_rewards.detach()[loss_mask].double() + gamma * next_values(value, ids) - value
    lam_policy = torch.full_like(value, lam)
    if length_adaptive_alpha is not None:
        lam_policy = _length_adaptive_lam(ids, length_adaptive_alpha)
    advantage = discounted_sums(surprise, ids, gamma * lam_policy)
    returned = value + advantage
    if lam_value is not None:
        returned = value + discounted_sums(surprise, ids, torch.full_like(value, gamma * lam_value))
    dtype = torch.promote_types(values.dtype, torch.float32)
    advantages, returns = (torch.zeros(values.shape, dtype=torch.float64, device=values.device) for _ in range(2))
    advantages[loss_mask], returns[loss_mask] = advantage, returned
    if whiten:
        advantages = whitened(advantages, loss_mask)
    return EstimatedAdvantages(advantages.to(dtype), returns.to(dtype))


def _length_adaptive_lam(ids: Tensor, alpha: float) -> Tensor:
    if not alpha > 0:
        raise ValueError(f"length_adaptive_alpha must be > 0, got {alpha}.")
    _, index, counts = ids.unique(return_inverse=True, return_counts=True)
    return (1 - 1 / (alpha * counts.double())).clamp(min=0)[index]


def _check(token_rewards: Tensor, values: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> None:
    if not token_rewards.shape == values.shape == loss_mask.shape == sequence_ids.shape:
        raise ValueError(
            f"token_rewards, values, loss_mask and sequence_ids must share a shape, got {tuple(token_rewards.shape)}, "
            f"{tuple(values.shape)}, {tuple(loss_mask.shape)} and {tuple(sequence_ids.shape)}."
        )
