"""PPO's clipped surrogate."""

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import TokenLoss, checked, checked_band, clamped_log_ratio


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate, with an asymmetric band and the dual-clip cap as options.

    With r = exp(logprobs - old_logprobs) and A = advantages:

        loss = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high))
        loss = min(loss, -A eps_clip_c)                                  where A < 0, if eps_clip_c is given

    Sources: Schulman et al. 2017 (arXiv:1707.06347) eq. 7; the asymmetric band is DAPO's clip-higher (arXiv:2503.14476)
    eq. 10; the cap is dual-clip PPO (Ye et al. 2020, arXiv:1912.09729) eq. 5. Departure: (1) log-ratios are clamped to
    +-20, so that no ratio overflows; beyond, the gradient is 0.

    Args:
        logprobs: E*, of the policy now; the only argument that carries gradient.
        old_logprobs: E*, of the policy before this step.
        advantages: E*.
        eps_clip: distance of the lower bound from 1, >= 0.
        eps_clip_high: distance of the upper bound from 1; None means eps_clip.
        eps_clip_c: cap on r where A < 0, > 1; None means no cap.

    Returns:
        TokenLoss: `clipped` is true where the clipped branch is the larger. The cap is reported by `dual_clipped`.

    Raises:
        ValueError: shapes differ, a bound is negative, or eps_clip_c <= 1.

    >>> A = torch.tensor([2.0, -2.0, 2.0, 1.0])
    >>> ratio = torch.tensor([2.0, 2.0, 0.5, 1.0])
    >>> loss, clipped = ppo_clip(ratio.log(), torch.zeros(4), A, eps_clip=0.2, eps_clip_c=1.5)
    >>> [round(x, 4) for x in loss.tolist()], clipped.tolist()
    ([-2.4, 3.0, -1.0, -1.0], [True, False, False, False])
    """
    high = checked_band(eps_clip, eps_clip_high)
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    plain = -advantages * ratio
    banded = -advantages * ratio.clamp(1 - eps_clip, 1 + high)
    clipped = banded > plain
    loss = torch.where(clipped, banded, plain)
    if eps_clip_c is not None:
        cap = _dual_cap(eps_clip_c)
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * cap), loss)
    return TokenLoss(loss, clipped.detach())


def _dual_cap(eps_clip_c: float) -> float:
    if not eps_clip_c > 1:
        raise ValueError(f"eps_clip_c must be > 1, got {eps_clip_c}: a cap at or below 1 would cut on-policy tokens.")
    return eps_clip_c


def dual_clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_clip_c: float) -> Tensor:
    """Where the dual-clip cap decides the loss of `ppo_clip`: A < 0 and r > eps_clip_c. Bool, shape E*, no gradient.

    >>> dual_clipped(torch.tensor([3.0, 2.0]).log(), torch.zeros(2), torch.tensor([-1.0, -1.0]), eps_clip_c=2.5).tolist()
    [True, False]
    """
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    return (advantages < 0) & (clamped_log_ratio(logprobs, old_logprobs).exp().detach() > _dual_cap(eps_clip_c))
