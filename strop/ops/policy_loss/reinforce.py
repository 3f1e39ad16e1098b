"""Losses without a band: REINFORCE, importance sampling, TOPR."""

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import MAX_LOG_RATIO, TokenLoss, checked, clamped_log_ratio
from strop.ops.policy_loss.sequences import checked_sequences, sequence_sum, zero_where_masked


def reinforce(logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """REINFORCE, without a ratio: loss = -A logprobs, gradient -A.

    Source: Williams 1992, eq. 11; per token as in Ahmadian et al. 2024 (arXiv:2402.14740). It takes samples for
    on-policy whatever their age.

    Args: logprobs E* (carries gradient), advantages E*. Returns TokenLoss; `clipped` is false everywhere. Raises
    ValueError where shapes differ.

    >>> reinforce(torch.tensor([-0.5, -2.0]), torch.tensor([2.0, -1.0])).loss.tolist()
    [1.0, -2.0]
    """
    logprobs, _, advantages = checked(logprobs, logprobs, advantages)
    loss = -advantages * logprobs
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def importance_sampling(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """The unclipped surrogate: loss = -A r with r = exp(logprobs - old_logprobs), gradient -A r.

    Source: Schulman et al. 2017 (arXiv:1707.06347) eq. 6. Departure: (1) log-ratios are clamped to +-20.

    Args: logprobs E* (carries gradient), old_logprobs E*, advantages E*. Returns TokenLoss; `clipped` is false
    everywhere. Raises ValueError where shapes differ.

    >>> importance_sampling(torch.tensor([2.0]).log(), torch.zeros(1), torch.tensor([-3.0])).loss.tolist()
    [6.0]
    """
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    loss = -advantages * clamped_log_ratio(logprobs, old_logprobs).exp()
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def topr(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    max_ratio: float,
) -> TokenLoss:
    """TOPR: good answers are imitated as they are, bad ones pushed down by their truncated importance weight.

    With R = exp(sum over the sequence's trainable tokens of logprobs - old_logprobs), held constant:

        loss = -A logprobs                     where A >= 0
        loss = -A min(R, max_ratio) logprobs   where A < 0

    Source: Le Roux et al. 2025 (arXiv:2503.14286) eq. 8 with a+ = b+ = 1, a- = 0 and b- = 1. Departure: (1) the sum of
    log-ratios is clamped to +-20.

    Args:
        logprobs: E*, of the policy now; carries gradient, but none flows through R.
        old_logprobs: E*, of the policy before this step.
        advantages: E*, equal within a sequence.
        loss_mask: E*, bool; masked tokens enter no sum and get loss 0.
        sequence_ids: E*, int.
        max_ratio: where the weight of a bad answer is cut, > 0.

    Returns:
        TokenLoss: `clipped` is true where the weight was cut.

    Raises:
        ValueError: shapes differ, the mask is not bool, or max_ratio is not positive.

    >>> mask, ids = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    >>> new, old, A = torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -0.5]), torch.tensor([-1.0, -1.0])
    >>> loss, _ = topr(new, old, A, mask, ids, max_ratio=1.0)
    >>> [round(x, 4) for x in loss.tolist()]
    [-1.0, -0.6065]
    """
    if not max_ratio > 0:
        raise ValueError(f"max_ratio must be > 0, got {max_ratio}.")
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    checked_sequences(logprobs, loss_mask, sequence_ids)
    logprobs = zero_where_masked(logprobs, loss_mask)
    advantages = zero_where_masked(advantages, loss_mask)
    log_ratio = sequence_sum((logprobs - old_logprobs).detach(), loss_mask, sequence_ids)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = (advantages < 0) & (ratio > max_ratio) & loss_mask
    weight = torch.where(advantages < 0, ratio.clamp(max=max_ratio), torch.ones_like(ratio))
    return TokenLoss(-weight * advantages * logprobs, clipped)
