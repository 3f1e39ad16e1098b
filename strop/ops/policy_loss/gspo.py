"""GSPO: the importance ratio of the whole sequence, its geometric mean over tokens."""

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import MAX_LOG_RATIO, TokenLoss, checked, checked_band
from strop.ops.policy_loss.sequences import checked_sequences, sequence_mean, zero_where_masked


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
) -> TokenLoss:
    """GSPO: PPO's clipped surrogate on the ratio of the sequence.

    With s = exp(mean over the sequence's trainable tokens of logprobs - old_logprobs):

        loss = max(-A s, -A clip(s, 1 - eps_clip, 1 + eps_clip_high))        the same at every token

    Source: Zheng et al. 2025 (arXiv:2507.18071) eq. 5 and 7; its bounds are 3e-4 and 4e-4. Departure: (1) the mean
    log-ratio is clamped to +-20. Gradient: averaged over a sequence's n tokens, -A s / n at each of them, 0 where the
    clipped branch decides.

    Args:
        logprobs: E*, of the policy now; carries gradient.
        old_logprobs: E*, of the policy before this step.
        advantages: E*, equal within a sequence.
        loss_mask: E*, bool; masked tokens enter no mean and get loss 0.
        sequence_ids: E*, int.
        eps_clip: distance of the lower bound from 1, >= 0.
        eps_clip_high: distance of the upper bound from 1, >= 0.

    Returns:
        TokenLoss: `clipped` is true where the clipped branch is the larger.

    Raises:
        ValueError: shapes differ, the mask is not bool, or a bound is negative.

    >>> log_ratio, A = torch.tensor([0.3, 0.1, 5.0]), torch.ones(3)
    >>> mask, ids = torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.int64)
    >>> loss, _ = gspo(log_ratio, torch.zeros(3), A, mask, ids, eps_clip=0.28, eps_clip_high=0.28)
    >>> [round(x, 4) for x in loss.tolist()]
    [-1.2214, -1.2214, 0.0]
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, loss_mask, sequence_ids)
    return _clipped_surrogate(log_ratio.exp(), advantages, loss_mask, eps_clip, eps_clip_high)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
) -> TokenLoss:
    """GSPO-token: the value of `gspo`, with advantages that may differ within a sequence.

        s_t = stop_gradient(s) exp(logprobs_t - stop_gradient(logprobs_t))
        loss_t = max(-A_t s_t, -A_t clip(s_t, 1 - eps_clip, 1 + eps_clip_high))

    Source: Zheng et al. 2025 (arXiv:2507.18071) eq. 13 and 14. Gradient: -A_t s at token t alone. Departure: (1) the
    mean log-ratio is clamped to +-20. Arguments, result and errors as in `gspo`.

    >>> log_ratio, A = torch.tensor([0.3, 0.1]), torch.tensor([1.0, 2.0])
    >>> mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    >>> loss, _ = gspo_token(log_ratio, torch.zeros(2), A, mask, ids, eps_clip=0.28, eps_clip_high=0.28)
    >>> [round(x, 4) for x in loss.tolist()]
    [-1.2214, -2.4428]
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, advantages, loss_mask, sequence_ids).detach()
    clean = zero_where_masked(logprobs.to(log_ratio.dtype), loss_mask)
    ratio = (log_ratio + clean - clean.detach()).exp()
    return _clipped_surrogate(ratio, advantages, loss_mask, eps_clip, eps_clip_high)


def _log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, sequence_ids: Tensor
) -> Tensor:
    logprobs, old_logprobs, _ = checked(logprobs, old_logprobs, advantages)
    checked_sequences(logprobs, loss_mask, sequence_ids)
    log_ratio = zero_where_masked(logprobs, loss_mask) - zero_where_masked(old_logprobs, loss_mask)
    return sequence_mean(log_ratio, loss_mask, sequence_ids).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, loss_mask: Tensor, eps_clip: float, eps_clip_high: float
) -> TokenLoss:
    high = checked_band(eps_clip, eps_clip_high)
    advantages = zero_where_masked(advantages.detach().to(ratio.dtype), loss_mask)
    plain = -advantages * ratio
    banded = -advantages * ratio.clamp(1 - eps_clip, 1 + high)
    clipped = (banded > plain) & loss_mask
    return TokenLoss(zero_where_masked(torch.where(clipped, banded, plain), loss_mask), clipped)
