"""Corrections for the gap between the sampler's policy and the trainer's: a weight per token, without gradient.

A weight multiplies the token's loss; 0 rejects it and leaves the weights of other tokens alone.
"""

from typing import Literal

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import MAX_LOG_RATIO, checked
from strop.ops.policy_loss.sequences import checked_sequences, sequence_mean, sequence_sum

Level = Literal["token", "sequence_sum", "sequence_mean"]


def _ratio(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, sequence_ids: Tensor, level: Level
) -> Tensor:
    """exp(trainer - sampler) of a token, or of its sequence: the product of its tokens, or their geometric mean."""
    if old_logprobs.shape != rollout_logprobs.shape:
        raise ValueError(
            "old_logprobs and rollout_logprobs must share a shape, "
            f"got {tuple(old_logprobs.shape)} and {tuple(rollout_logprobs.shape)}."
        )
    checked_sequences(old_logprobs, loss_mask, sequence_ids)
    dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
    gap = old_logprobs.detach().to(dtype) - rollout_logprobs.detach().to(dtype)
    gap = torch.where(loss_mask, gap, torch.zeros_like(gap))
    if level == "sequence_sum":
        gap = sequence_sum(gap, loss_mask, sequence_ids)
    elif level == "sequence_mean":
        gap = sequence_mean(gap, loss_mask, sequence_ids)
    elif level != "token":
        raise ValueError(f"level must be token, sequence_sum or sequence_mean, got {level!r}.")
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"min_ratio and max_ratio must be 0 <= min_ratio <= max_ratio, got {low} and {high}.")


def truncate(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    level: Level,
    min_ratio: float,
    max_ratio: float,
) -> Tensor:
    """Truncated importance sampling (TIS): the ratio of trainer to sampler, held in [min_ratio, max_ratio].

        w = clip(exp(old_logprobs - rollout_logprobs), min_ratio, max_ratio)

    with the exponent summed ("sequence_sum") or averaged ("sequence_mean") over a sequence's trainable tokens, if so asked.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". Departure: (1) log-ratios
    are clamped to +-20.

    Args: old_logprobs, rollout_logprobs E*; loss_mask E*, bool; sequence_ids E*, int; level; min_ratio, max_ratio >= 0.
    Returns E*, no gradient, 1 where masked. Raises ValueError for shapes that differ and a range that is none.

    >>> mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    >>> old, rollout = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])
    >>> truncate(old, rollout, mask, ids, level="token", min_ratio=0.0, max_ratio=2.0).tolist()
    [1.0, 2.0]
    """
    _check_range(min_ratio, max_ratio)
    ratio = _ratio(old_logprobs, rollout_logprobs, loss_mask, sequence_ids, level)
    return torch.where(loss_mask, ratio.clamp(min_ratio, max_ratio), torch.ones_like(ratio))


def mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    level: Level,
    min_ratio: float,
    max_ratio: float,
) -> Tensor:
    """Masked importance sampling (IcePop): the ratio of trainer to sampler, 0 outside [min_ratio, max_ratio].

    Source: Ling team 2025, "Small leak can sink a great ship". Arguments, result and errors as in `truncate`.

    >>> keep, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    >>> old, rollout = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])
    >>> mask(old, rollout, keep, ids, level="token", min_ratio=0.5, max_ratio=2.0).tolist()
    [1.0, 0.0]
    """
    _check_range(min_ratio, max_ratio)
    ratio = _ratio(old_logprobs, rollout_logprobs, loss_mask, sequence_ids, level)
    outside = (ratio < min_ratio) | (ratio > max_ratio)  # a NaN is neither, and is not hidden
    kept = torch.where(outside, torch.zeros_like(ratio), ratio)
    return torch.where(loss_mask, kept, torch.ones_like(ratio))


def veto(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, sequence_ids: Tensor, *, min_token_ratio: float
) -> Tensor:
    """0 for every trainable token of a sequence in which one of them has a ratio below min_token_ratio, else 1.

    Arguments, result and errors as in `truncate`; min_token_ratio > 0.

    >>> keep, ids = torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    >>> veto(torch.tensor([0.0, -9.0, 0.0]), torch.zeros(3), keep, ids, min_token_ratio=1e-3).tolist()
    [0.0, 0.0, 1.0]
    """
    if not min_token_ratio > 0:
        raise ValueError(f"min_token_ratio must be > 0, got {min_token_ratio}.")
    ratio = _ratio(old_logprobs, rollout_logprobs, loss_mask, sequence_ids, "token")
    bad = ((ratio < min_token_ratio) & loss_mask).to(ratio.dtype)
    is_vetoed = (sequence_sum(bad, loss_mask, sequence_ids) > 0) & loss_mask
    return torch.where(is_vetoed, torch.zeros_like(ratio), torch.ones_like(ratio))


def opsm(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    opsm_delta: float,
) -> Tensor:
    """Off-policy sequence masking: 0 for sequences with A < 0 from which the policy has moved away, else 1.

        w = 0  where A < 0 and mean over the sequence of (old_logprobs - logprobs) > opsm_delta

    Source: DeepSeek-V3.2 (arXiv:2512.02556) eq. 9. Shapes E*; no gradient, 1 where masked. Raises ValueError for shapes that
    differ and a negative opsm_delta.

    >>> keep, ids = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    >>> new, old, A = torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, 1.0])
    >>> opsm(new, old, A, keep, ids, opsm_delta=0.5).tolist()
    [0.0, 1.0]
    """
    if not opsm_delta >= 0:
        raise ValueError(f"opsm_delta must be >= 0, got {opsm_delta}.")
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    checked_sequences(logprobs, loss_mask, sequence_ids)
    moved = (old_logprobs - logprobs).detach()
    distance = sequence_mean(moved, loss_mask, sequence_ids)
    rejected = (advantages < 0) & (distance > opsm_delta) & loss_mask
    return torch.where(rejected, torch.zeros_like(distance), torch.ones_like(distance))
