"""ASPO: the importance weight of good tokens is turned over, so that unlikely ones are lifted most."""

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import TokenLoss, checked, checked_band, clamped_log_ratio


def aspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    max_weight: float,
) -> TokenLoss:
    """ASPO: weight 1 / r, cut at max_weight, where A > 0, and r elsewhere; tokens that PPO would clip get no gradient.

    With r = exp(logprobs - old_logprobs), held constant:

        keep = not (A > 0 and r > 1 + eps_clip_high  or  A < 0 and r < 1 - eps_clip)
        w = min(1 / r, max_weight) where A > 0,   r elsewhere
        loss = -keep w A logprobs

    Where A < 0 its gradient is that of PPO's clipped surrogate, -A r or nothing. Source: Wang et al. 2025
    (arXiv:2510.06062) section 4; its band is 0.2 on both sides, and it does not say where it cuts the weight. Departure:
    (1) log-ratios are clamped to +-20.

    Args:
        logprobs: E*, of the policy now; carries gradient, but none flows through r.
        old_logprobs: E*, of the policy before this step.
        advantages: E*.
        eps_clip: distance of PPO's lower bound from 1, >= 0.
        eps_clip_high: distance of PPO's upper bound from 1, >= 0.
        max_weight: where the weight is cut where A > 0; its token keeps its gradient. > 0.

    Returns:
        TokenLoss: `clipped` is true where a token is not kept or its weight was cut.

    Raises:
        ValueError: shapes differ, or a bound is out of range.

    >>> ratio, A = torch.tensor([0.5, 0.1, 1.5, 9.0]), torch.tensor([1.0, 1.0, 1.0, -1.0])
    >>> loss, clipped = aspo(ratio.log(), torch.zeros(4), A, eps_clip=0.2, eps_clip_high=0.28, max_weight=3.0)
    >>> [round(x / y, 2) for x, y in zip(loss.tolist(), (-A * ratio.log()).tolist())], clipped.tolist()
    ([2.0, 3.0, 0.0, 9.0], [False, True, True, False])
    """
    high = checked_band(eps_clip, eps_clip_high)
    if not max_weight > 0:
        raise ValueError(f"max_weight must be > 0, got {max_weight}.")
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    ratio = clamped_log_ratio(logprobs.detach(), old_logprobs).exp()
    dropped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - eps_clip))
    is_cut = (advantages > 0) & (1 / ratio > max_weight)
    weight = torch.where(advantages > 0, (1 / ratio).clamp(max=max_weight), ratio)
    loss = -torch.where(dropped, torch.zeros_like(weight), weight) * advantages * logprobs
    return TokenLoss(loss, dropped | is_cut)
