"""DPPO: a trust region in probability, not in the ratio."""

from typing import Literal

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import TokenLoss, checked, clamped_log_ratio

# The paper's bounds, where none is given: in probability and in nats.
DEFAULT_MAX_DIVERGENCE = {"tv": 0.15, "kl": 0.05}


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"],
    max_divergence: float | None = None,
    max_divergence_high: float | None = None,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """DPPO: a token that has moved too far, in the direction its advantage pulls, gets no gradient.

    With p = exp(logprobs), q = exp(old_logprobs), r = p / q:

        D = |p - q|                                               divergence = "tv"
        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))         divergence = "kl"
        keep = not (A > 0 and p > q and D > max_divergence_high  or  A < 0 and p < q and D > max_divergence)
        loss = -keep stop_gradient(min(r, max_ratio)) A logprobs

    Source: Qi et al. 2026 (arXiv:2602.04879), the binary divergences of section 4. Departures: (1) log-ratios are
    clamped to +-20; (2) in "kl", probabilities are kept 1e-7 away from 1.

    Args:
        logprobs: E*, of the policy now; carries gradient, but none flows through r or D.
        old_logprobs: E*, of the policy that sampled.
        advantages: E*.
        divergence: which of the two.
        max_divergence: bound on D where p < q, >= 0; in probability ("tv") or nats ("kl"). None means the paper's 0.15 for
            "tv" and 0.05 for "kl".
        max_divergence_high: bound on D where p > q; None means max_divergence.
        max_ratio: where the weight is cut, > 0.

    Returns:
        TokenLoss: `clipped` is true where a token is not kept.

    Raises:
        ValueError: shapes differ, or a bound is out of range.

    >>> old, A = torch.tensor([0.5, 0.01]).log(), torch.ones(2)
    >>> loss, clipped = dppo(torch.tensor([0.8, 0.02]).log(), old, A, divergence="tv", max_divergence=0.15)
    >>> clipped.tolist()
    [True, False]
    """
    if divergence not in DEFAULT_MAX_DIVERGENCE:
        raise ValueError(f"divergence must be tv or kl, got {divergence!r}.")
    low = DEFAULT_MAX_DIVERGENCE[divergence] if max_divergence is None else max_divergence
    high = low if max_divergence_high is None else max_divergence_high
    if not (low >= 0 and high >= 0 and max_ratio > 0):
        raise ValueError(
            "max_divergence and max_divergence_high must be >= 0 and max_ratio > 0, "
            f"got {max_divergence}, {max_divergence_high} and {max_ratio}."
        )
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    p, q = logprobs.detach().exp(), old_logprobs.exp()
    distance = (p - q).abs() if divergence == "tv" else _binary_kl(q, p)
    too_high = (advantages > 0) & (p > q) & (distance > high)
    too_low = (advantages < 0) & (p < q) & (distance > low)
    clipped = too_high | too_low
    weight = clamped_log_ratio(logprobs.detach(), old_logprobs).exp().clamp(max=max_ratio)
    return TokenLoss(-torch.where(clipped, torch.zeros_like(weight), weight) * advantages * logprobs, clipped)


def _binary_kl(q: Tensor, p: Tensor) -> Tensor:
    """KL(Bernoulli(q) || Bernoulli(p))."""
    q, p = q.clamp(1e-30, 1 - 1e-7), p.clamp(1e-30, 1 - 1e-7)
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
