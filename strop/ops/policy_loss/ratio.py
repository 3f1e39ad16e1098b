"""What every policy loss shares: the result, the checks, the ratio."""

from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) = 4.9e8: no ratio beyond it means anything, and float32 overflows at exp(88.7).
MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    """Unreduced loss of a policy, and where its bound decided the value. Both have the shape E* of the call."""

    loss: Tensor
    clipped: Tensor


def checked(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One shape, at least float32, and gradient through `logprobs` alone."""
    if not logprobs.shape == old_logprobs.shape == advantages.shape:
        raise ValueError(
            f"logprobs, old_logprobs and advantages must share a shape, got {tuple(logprobs.shape)}, "
            f"{tuple(old_logprobs.shape)} and {tuple(advantages.shape)}."
        )
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype), old_logprobs.detach().to(dtype), advantages.detach().to(dtype)


def clamped_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """logprobs - old_logprobs within +-20; beyond, the gradient is 0."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def checked_band(eps_clip: float, eps_clip_high: float | None) -> float:
    """The upper distance of a band, after refusing distances that are negative or NaN."""
    if not eps_clip >= 0 or (eps_clip_high is not None and not eps_clip_high >= 0):  # NaN is no bound either
        raise ValueError(f"eps_clip and eps_clip_high must be >= 0, got {eps_clip} and {eps_clip_high}.")
    return eps_clip if eps_clip_high is None else eps_clip_high
