"""The loss of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.ops.policy_loss import TokenLoss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, eps_clip_value: float | None) -> TokenLoss:
    """Half the squared distance to the return, the larger of that of the value and of the value held near the old one.

        loss = 1/2 max((V - R)^2, (clip(V, V_old - eps_clip_value, V_old + eps_clip_value) - R)^2)

    A value that moves towards its return loses its gradient once it has moved by more than eps_clip_value.

    Source: the value clipping of OpenAI's baselines, as described by Huang et al. 2022 ("The 37 implementation details of
    PPO", detail 9).

    Args:
        values: E*, of the critic now; the only argument that carries gradient.
        old_values: E*, of the critic before the batch's first update.
        returns: E*.
        eps_clip_value: > 0, in units of reward; None means that values are not clipped.

    Returns:
        TokenLoss: `clipped` is true where the clipped value's distance is the larger.

    Raises:
        ValueError: shapes differ, or eps_clip_value <= 0.

    >>> loss, clipped = value_loss(torch.tensor([0.5, 0.5]), torch.zeros(2), torch.tensor([1.0, 0.0]), eps_clip_value=0.2)
    >>> [round(x, 3) for x in loss.tolist()], clipped.tolist()
    ([0.32, 0.125], [True, False])
    """
    if not values.shape == old_values.shape == returns.shape:
        raise ValueError(
            f"values, old_values and returns must share a shape, got {tuple(values.shape)}, {tuple(old_values.shape)} and "
            f"{tuple(returns.shape)}."
        )
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    old_values, returns = old_values.detach(), returns.detach()
    plain = (values - returns).square()
    if eps_clip_value is None:
        return TokenLoss(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    if not eps_clip_value > 0:
        raise ValueError(f"eps_clip_value must be > 0, got {eps_clip_value}: a value could not move.")
    held = torch.minimum(torch.maximum(values, old_values - eps_clip_value), old_values + eps_clip_value)
    banded = (held - returns).square()
    clipped = banded > plain
    return TokenLoss(torch.where(clipped, banded, plain) / 2, clipped.detach())
