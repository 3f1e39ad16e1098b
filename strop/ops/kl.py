"""Estimators of KL(policy || reference) from log-probabilities of tokens that the policy sampled."""

from typing import Literal

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import MAX_LOG_RATIO, clamped_log_ratio

KLKind = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None = None, *, kind: KLKind) -> Tensor:
    """Per-token estimate of KL(policy || reference).

    With d = logprobs - ref_logprobs:

        k1 = d                      unbiased value; its expected gradient is 0
        k2 = d^2 / 2                biased value, gradient of the true KL on-policy
        k3 = exp(-d) + d - 1        unbiased, never negative, low variance

    With old_logprobs, the log-probabilities that the tokens were sampled at, the estimate is multiplied by
    exp(logprobs - old_logprobs), through which gradient flows: its expected gradient is then that of the KL, whatever the kind
    (DeepSeek-V3.2, arXiv:2512.02556 eq. 7).

    Source: Schulman 2020, "Approximating KL divergence". Departure: (1) in k3, -d is held at 20 from there on, where the
    exponential is 4.9e8; beyond, the gradient is 0.

    Args:
        logprobs: E*, of the policy; carries gradient.
        ref_logprobs: E*, of the frozen reference.
        old_logprobs: E*, or None for the plain estimate.
        kind: the estimator.

    Returns:
        E*, at least float32.

    Raises:
        ValueError: shapes differ or the kind is unknown.

    >>> d = torch.tensor([0.0, 0.5])
    >>> [round(x, 4) for x in kl_estimate(d, torch.zeros(2), kind="k3").tolist()]
    [0.0, 0.1065]
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs and ref_logprobs must share a shape, got {tuple(logprobs.shape)} and {tuple(ref_logprobs.shape)}."
        )
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = logprobs.to(dtype) - ref_logprobs.detach().to(dtype)
    estimate = _estimate(difference, kind)
    if old_logprobs is None:
        return estimate
    if old_logprobs.shape != logprobs.shape:
        raise ValueError(
            f"logprobs and old_logprobs must share a shape, got {tuple(logprobs.shape)} and {tuple(old_logprobs.shape)}."
        )
    return clamped_log_ratio(logprobs.to(dtype), old_logprobs.detach().to(dtype)).exp() * estimate


def _estimate(difference: Tensor, kind: KLKind) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        back = (-difference).clamp(max=MAX_LOG_RATIO)
        return (back.expm1() - back).clamp(min=0)  # expm1: accurate where both are nearly equal
    raise ValueError(f"kind must be one of k1, k2, k3, got {kind!r}.")
