"""Clip-Cov and KL-Cov: the few tokens that drive entropy down most are held back.

Which tokens these are is decided once for a whole optimizer step, before it is cut, from the log-probabilities before
the step: so the choice depends on no micro-batch.
"""

import torch
from torch import Tensor

from strop.ops.policy_loss.ppo import ppo_clip
from strop.ops.policy_loss.ratio import TokenLoss, checked, clamped_log_ratio


def covariances(old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Each token's share in the covariance of log-probability and advantage over the trainable tokens of a step.

        cov_t = (old_logprobs_t - mean(old_logprobs)) (A_t - mean(A))

    Source: Cui et al. 2025 (arXiv:2505.22617) eq. 10. Shapes E*; -inf where masked. Computed in float64, in which equal
    advantages have equal distances from their mean.

    >>> covariances(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -1.0]), torch.tensor([True, True])).tolist()
    [1.0, 1.0]
    """
    old_logprobs, _, advantages = checked(old_logprobs.detach().double(), old_logprobs, advantages.double())
    found = torch.full_like(old_logprobs, -torch.inf)
    chosen, weighed = old_logprobs[loss_mask], advantages[loss_mask]
    if chosen.numel():
        found[loss_mask] = (chosen - chosen.mean()) * (weighed - weighed.mean())
    return found


def largest_covariances(old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, cov_fraction: float) -> Tensor:
    """The tokens of a step with the largest covariances: cov_fraction of the trainable ones, at least 1, all above 0.

    Source: Cui et al. 2025 (arXiv:2505.22617) eq. 13. Tokens that tie with the last one are taken too. Departure: (1) only
    covariances above 0 are taken, up to rounding: a step whose advantages are all equal has none, and none is singled out.

    Args: old_logprobs, advantages E*; loss_mask E*, bool; cov_fraction in (0, 1]. Returns E*, bool. Raises ValueError for
    a cov_fraction out of range.

    >>> old, A = torch.tensor([-0.1, -2.0, -4.0]), torch.tensor([1.0, 0.0, -1.0])
    >>> largest_covariances(old, A, torch.ones(3, dtype=torch.bool), cov_fraction=0.3).tolist()
    [False, False, True]
    """
    cov = covariances(old_logprobs, advantages, loss_mask)
    rounding = 1e-12 * old_logprobs[loss_mask].abs().sum() * advantages[loss_mask].abs().sum()
    return _largest(cov, loss_mask & (cov > rounding), loss_mask, cov_fraction)


def covariances_in_band(
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cov_fraction: float,
    cov_low: float,
    cov_high: float,
) -> Tensor:
    """The tokens of a step with the largest covariances within [cov_low, cov_high]; at most cov_fraction of all, or 1.

    Departures from arXiv:2505.22617 eq. 11: (1) it draws at random within the band; here the largest are taken, so that the
    choice is the same in every run and for every order of the tokens; (2) the choice is made before the step, when no ratio
    is known, so that tokens that PPO's bounds will clip can be among them. The band includes its bounds, as in the paper.
    Arguments, result and errors as in `largest_covariances`.

    >>> old, A = torch.tensor([-0.1, -2.0, -4.0]), torch.tensor([1.0, 0.0, -1.0])
    >>> mask = torch.ones(3, dtype=torch.bool)
    >>> covariances_in_band(old, A, mask, cov_fraction=0.3, cov_low=1.0, cov_high=1.95).tolist()
    [True, False, False]
    """
    cov = covariances(old_logprobs, advantages, loss_mask)
    return _largest(cov, loss_mask & (cov >= cov_low) & (cov <= cov_high), loss_mask, cov_fraction)


def _largest(cov: Tensor, eligible: Tensor, loss_mask: Tensor, cov_fraction: float) -> Tensor:
    if not 0 < cov_fraction <= 1:
        raise ValueError(f"cov_fraction must be in (0, 1], got {cov_fraction}.")
    count = min(max(int(cov_fraction * int(loss_mask.sum())), 1), int(eligible.sum()))
    if count == 0:
        return torch.zeros_like(eligible)
    return eligible & (cov >= cov[eligible].topk(count).values[-1])


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> TokenLoss:
    """Clip-Cov: PPO's clipped surrogate; selected tokens lose value and gradient.

        loss = ppo_clip(...)   where not selected,   0 where selected

    Source: Cui et al. 2025 (arXiv:2505.22617) eq. 11 and 12; its bounds are 1 on both sides. `selected`: E*, bool, from
    `covariances_in_band`; the other arguments, result and errors as in `ppo_clip`.

    >>> A = torch.tensor([1.0, 1.0])
    >>> loss, _ = clip_cov(torch.zeros(2), torch.zeros(2), A, torch.tensor([True, False]), eps_clip=1.0)
    >>> loss.abs().tolist()
    [0.0, 1.0]
    """
    _check_selection(selected, logprobs)
    loss, clipped = ppo_clip(logprobs, old_logprobs, advantages, eps_clip=eps_clip, eps_clip_high=eps_clip_high)
    return TokenLoss(torch.where(selected, torch.zeros_like(loss), loss), clipped | selected)


# Log-probabilities of one token from two passes that were cut differently differ by less, in float32.
ROUNDING = 1e-4


def kl_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, selected: Tensor, *, cov_kl_coef: float
) -> TokenLoss:
    """KL-Cov: the unclipped surrogate; selected tokens are held near where they were.

        loss = -A r + cov_kl_coef |logprobs - old_logprobs| [selected],      r = exp(logprobs - old_logprobs)

    Source: Cui et al. 2025 (arXiv:2505.22617) eq. 13 and 14; its coefficient is 1. Departures: (1) log-ratios are clamped to
    +-20; (2) the penalty has no gradient within 1e-4 of log r = 0, where its sign would be that of rounding. `selected`: E*,
    bool, from `largest_covariances`; `clipped` is what was selected; errors as in `ppo_clip`.

    >>> A = torch.tensor([1.0, 1.0])
    >>> loss, _ = kl_cov(torch.tensor([0.5, 0.0]), torch.zeros(2), A, torch.tensor([True, False]), cov_kl_coef=1.0)
    >>> [round(x, 4) for x in loss.tolist()]
    [-1.1487, -1.0]
    """
    _check_selection(selected, logprobs)
    if not cov_kl_coef >= 0:
        raise ValueError(f"cov_kl_coef must be >= 0, got {cov_kl_coef}.")
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    distance = torch.where(log_ratio.abs() > ROUNDING, log_ratio, log_ratio.detach()).abs()
    penalty = torch.where(selected, cov_kl_coef * distance, torch.zeros_like(log_ratio))
    return TokenLoss(-advantages * log_ratio.exp() + penalty, selected)


def _check_selection(selected: Tensor, logprobs: Tensor) -> None:
    if selected.dtype != torch.bool or selected.shape != logprobs.shape:
        raise ValueError(
            "logprobs and selected must share a shape and selected be bool, "
            f"got {tuple(logprobs.shape)} and {selected.dtype} of {tuple(selected.shape)}."
        )
