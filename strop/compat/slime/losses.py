"""slime's two policy losses: its names, arguments and results over `strop.ops`.

`ppo_kl` is old minus new log-probability, so that the ratio of the policies is exp(-ppo_kl).
"""

import torch
from torch import Tensor

from strop.ops import cispo, ppo_clip


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor | float, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate as slime calls it, with the dual-clip cap handed on: `strop.ops.ppo_clip` of -ppo_kl and 0.

    Departures from slime: (1) log-ratios are clamped to +-20; (2) the result is at least float32, where slime's has the
    type of its arguments.

    Args:
        ppo_kl: E*, old_logprobs - logprobs; carries gradient.
        advantages: E*, or of any shape that broadcasts to it, such as one number.
        eps_clip: distance of the ratio's lower bound from 1.
        eps_clip_high: distance of its upper bound.
        eps_clip_c: cap on the ratio where the advantage is negative, > 1; None means no cap.

    Returns:
        The loss of each token, E*, and 1.0 where the clipped branch decided, else 0.0, whose mean is the clip fraction.

    Raises:
        ValueError: shapes differ, a bound is negative, or eps_clip_c <= 1.

    >>> ppo_kl, A = -torch.tensor([2.0, 4.0, 0.5, 1.0]).log(), torch.tensor([1.0, -1.0, -1.0, 2.0])
    >>> loss, clipped = compute_policy_loss(ppo_kl, A, 0.2, 0.28, 3.0)
    >>> [round(x, 4) for x in loss.tolist()], clipped.tolist()
    ([-1.28, 3.0, 0.8, -2.0], [1.0, 0.0, 1.0, 0.0])
    """
    loss, clipped = ppo_clip(
        -ppo_kl,
        torch.zeros_like(ppo_kl),
        _broadcast(advantages, ppo_kl),
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
        eps_clip_c=eps_clip_c,
    )
    return loss, clipped.to(loss.dtype)


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor | float, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO as slime calls it: `strop.ops.cispo`. Gradient flows through log_probs alone.

    Departures from slime: as in `compute_policy_loss`.

    Args:
        ppo_kl: E*, old_logprobs - logprobs; gives the weight, no gradient.
        log_probs: E*, of the policy now; carries gradient.
        advantages: E*, or of any shape that broadcasts to it, such as one number.
        eps_clip: distance of the weight's lower bound from 1; 1 or more means none.
        eps_clip_high: distance of its upper bound.

    Returns:
        The loss of each token, E*, and 1.0 where the weight was cut, else 0.0.

    Raises:
        ValueError: shapes differ or a bound is negative.

    >>> log_probs, A = torch.tensor([-1.0, -2.0, -0.5, -1.0]), torch.tensor([1.0, -1.0, 2.0, 1.0])
    >>> loss, clipped = compute_cispo_loss(-torch.tensor([6.0, 1.5, 0.1, 1.0]).log(), log_probs, A, 1.0, 4.0)
    >>> [round(x, 4) for x in loss.tolist()], clipped.tolist()
    ([5.0, -3.0, 0.1, 1.0], [1.0, 0.0, 0.0, 0.0])
    """
    now = log_probs.double()  # so that old - new, taken apart and put together again, is the same number
    advantages = _broadcast(advantages, ppo_kl)
    loss, clipped = cispo(now, now + ppo_kl.double(), advantages, eps_clip=eps_clip, eps_clip_high=eps_clip_high)
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return loss.to(dtype), clipped.to(dtype)


def _broadcast(advantages: Tensor | float, like: Tensor) -> Tensor:
    """Advantages in the shape of the tokens, as slime's products make them; of another rank or length they stay as they are."""
    found = torch.as_tensor(
        advantages, dtype=None if isinstance(advantages, Tensor) else like.dtype, device=like.device
    )
    fits = found.dim() <= like.dim() and all(
        size in (1, other) for size, other in zip(reversed(found.shape), reversed(like.shape), strict=False)
    )
    return found.expand_as(like) if fits else found
