"""Policy losses: each maps per-token tensors of one shape E* to an unreduced loss of that shape.

How losses are averaged is not decided here: the caller multiplies by token weights (`strop.ops.token_weights`) and
sums. Masked tokens are to be selected out before the call.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) = 4.9e8: no ratio beyond it means anything, and float32 overflows at exp(88.7).
MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """Unreduced loss of a policy, and where its band decided the value. Both have the shape E* of the call."""

    loss: Tensor
    clipped: Tensor


def _check(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One shape, at least float32, and gradient through `logprobs` alone."""
    if not logprobs.shape == old_logprobs.shape == advantages.shape:
        raise ValueError(
            f"logprobs, old_logprobs and advantages must share a shape, got {tuple(logprobs.shape)}, "
            f"{tuple(old_logprobs.shape)} and {tuple(advantages.shape)}."
        )
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype), old_logprobs.detach().to(dtype), advantages.detach().to(dtype)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _check_band(eps_clip: float, eps_clip_high: float | None) -> float:
    if not eps_clip >= 0 or (eps_clip_high is not None and not eps_clip_high >= 0):  # NaN is no bound either
        raise ValueError(f"eps_clip and eps_clip_high must be >= 0, got {eps_clip} and {eps_clip_high}.")
    return eps_clip if eps_clip_high is None else eps_clip_high


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
    high = _check_band(eps_clip, eps_clip_high)
    logprobs, old_logprobs, advantages = _check(logprobs, old_logprobs, advantages)
    ratio = _ratio(logprobs, old_logprobs)
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
    logprobs, old_logprobs, advantages = _check(logprobs, old_logprobs, advantages)
    return (advantages < 0) & (_ratio(logprobs, old_logprobs).detach() > _dual_cap(eps_clip_c))


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> TokenLoss:
    """CISPO: REINFORCE whose importance weight is clipped under a stop-gradient, so every token keeps its gradient.

    With r = exp(logprobs - old_logprobs), A = advantages and w = clip(r, 1 - eps_clip, 1 + eps_clip_high), held
    constant:

        loss = -w A logprobs            gradient by logprobs = -w A

    Source: MiniMax-M1 (arXiv:2506.13585) eq. 4 and 5. The canonical form has no lower bound: eps_clip = 1 makes it 0.
    Departure: (1) log-ratios are clamped to +-20 before the exponential.

    Args:
        logprobs: E*, of the policy now; carries gradient, but none flows through r.
        old_logprobs: E*, of the policy before this step.
        advantages: E*.
        eps_clip: distance of the lower bound from 1, >= 0; 1 or more means no lower bound.
        eps_clip_high: distance of the upper bound from 1, >= 0.

    Returns:
        TokenLoss: `clipped` is true where the weight was cut.

    Raises:
        ValueError: shapes differ or a bound is negative.

    >>> ratio = torch.tensor([1.0, 1.14, 1.56, 0.4])
    >>> logprobs = torch.tensor([-0.7, -1.2, -0.4, -2.1])
    >>> A = torch.tensor([1.0, -0.5, 2.0, -1.0])
    >>> loss, clipped = cispo(logprobs, logprobs - ratio.log(), A, eps_clip=0.2, eps_clip_high=0.28)
    >>> [round(x, 4) for x in loss.tolist()], clipped.tolist()
    ([0.7, -0.684, 1.024, -1.68], [False, False, True, True])
    """
    high = _check_band(eps_clip, eps_clip_high)
    logprobs, old_logprobs, advantages = _check(logprobs, old_logprobs, advantages)
    ratio = _ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(max(0.0, 1 - eps_clip), 1 + high)
    return TokenLoss(-weight * advantages * logprobs, weight != ratio)
