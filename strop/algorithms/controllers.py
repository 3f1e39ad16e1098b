"""Coefficients that follow a measured quantity, one step per batch."""

from __future__ import annotations


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon_steps: int) -> float:
    """coef (1 + e / horizon_steps),  e = kl / target - 1 held in [-0.2, 0.2].

    Source: Ziegler et al. 2019 (arXiv:1909.08593) section 2.2, per batch instead of per sample.

    >>> adapted_kl_coef(0.1, 0.02, target=0.01, horizon_steps=10)
    0.10200000000000001
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error / horizon_steps)


def adapted_entropy_coef(coef: float, entropy: float, *, target: float, step: float) -> float:
    """coef + step while entropy is below the target, else coef - step, never below 0.

    Source: He et al. 2025 (Skywork-OR1, arXiv:2505.22312) section 3.2.4.

    >>> adapted_entropy_coef(0.0, 0.1, target=0.2, step=0.005), adapted_entropy_coef(0.005, 0.3, target=0.2, step=0.005)
    (0.005, 0.0)
    """
    return max(0.0, coef + step if entropy < target else coef - step)
