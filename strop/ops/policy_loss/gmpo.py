"""GMPO: the geometric mean of clipped token ratios."""

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import TokenLoss, checked, checked_band, clamped_log_ratio
from strop.ops.policy_loss.sequences import checked_sequences, sequence_mean, zero_where_masked


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
) -> TokenLoss:
    """GMPO: every token's log-ratio is clipped against the advantage's sign, then averaged over the sequence.

    With l_t = logprobs_t - old_logprobs_t:

        c_t = min(l_t, eps_clip_high) where A > 0,   max(l_t, -eps_clip) where A < 0
        loss = -A exp(mean over the sequence's trainable tokens of c_t)        the same at every token

    Source: Zhao et al. 2025 (arXiv:2507.20673) eq. 4; its bounds are 0.4 and 0.4. The bounds are distances of the
    log-ratio from 0. Departure: (1) log-ratios are clamped to +-20. Gradient: none through a clipped token.

    Args:
        logprobs: E*, of the policy now; carries gradient.
        old_logprobs: E*, of the policy before this step.
        advantages: E*, equal within a sequence.
        loss_mask: E*, bool; masked tokens enter no mean and get loss 0.
        sequence_ids: E*, int.
        eps_clip: distance of the log-ratio's lower bound from 0, >= 0.
        eps_clip_high: distance of the log-ratio's upper bound from 0, >= 0.

    Returns:
        TokenLoss: `clipped` is true where a token's own log-ratio was clipped.

    Raises:
        ValueError: shapes differ, the mask is not bool, or a bound is negative.

    >>> log_ratio, A = torch.tensor([0.6, 0.2]), torch.ones(2)
    >>> mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    >>> loss, clipped = gmpo(log_ratio, torch.zeros(2), A, mask, ids, eps_clip=0.4, eps_clip_high=0.4)
    >>> [round(x, 4) for x in loss.tolist()], clipped.tolist()
    ([-1.3499, -1.3499], [True, False])
    """
    high = checked_band(eps_clip, eps_clip_high)
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    checked_sequences(logprobs, loss_mask, sequence_ids)
    log_ratio = clamped_log_ratio(zero_where_masked(logprobs, loss_mask), zero_where_masked(old_logprobs, loss_mask))
    advantages = zero_where_masked(advantages, loss_mask)
    clipped = ((advantages > 0) & (log_ratio > high)) | ((advantages < 0) & (log_ratio < -eps_clip))
    bounded = torch.where(clipped, log_ratio.clamp(-eps_clip, high), log_ratio)
    ratio = sequence_mean(bounded, loss_mask, sequence_ids).exp()
    return TokenLoss(zero_where_masked(-advantages * ratio, loss_mask), (clipped & loss_mask).detach())
