"""SAPO: a smooth gate in place of a clip."""

import torch
from torch import Tensor

from strop.ops.policy_loss.ratio import TokenLoss, checked, clamped_log_ratio


def sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float) -> TokenLoss:
    """SAPO: the ratio passes through a sigmoid whose slope at 1 is that of the ratio.

    With r = exp(logprobs - old_logprobs) and tau = tau_pos where A > 0, tau_neg elsewhere:

        loss = -A (4 / tau) sigmoid(tau (r - 1))
        gradient = -A 4 p (1 - p) r,   p = sigmoid(tau (r - 1));   -A on-policy

    Source: Gao et al. 2025 (arXiv:2511.20347) eq. 5 and 6; its temperatures are 1.0 and 1.05. Departure: (1) log-ratios
    are clamped to +-20.

    Args:
        logprobs: E*, of the policy now; carries gradient.
        old_logprobs: E*, of the policy before this step.
        advantages: E*.
        tau_pos: how fast the gate closes where A > 0, > 0.
        tau_neg: how fast it closes elsewhere, > 0.

    Returns:
        TokenLoss: `clipped` is false everywhere: nothing is cut.

    Raises:
        ValueError: shapes differ or a temperature is not positive.

    >>> loss, _ = sapo(torch.tensor([2.0]).log(), torch.zeros(1), torch.ones(1), tau_pos=1.0, tau_neg=1.05)
    >>> round(loss.item(), 4)
    -2.9242
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be > 0, got {tau_pos} and {tau_neg}.")
    logprobs, old_logprobs, advantages = checked(logprobs, old_logprobs, advantages)
    ratio = clamped_log_ratio(logprobs, old_logprobs).exp()
    tau = torch.where(
        advantages > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg)
    )  # two floats make float32
    loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))
