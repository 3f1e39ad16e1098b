"""Whitening: mean 0 and standard deviation 1 over the trainable entries of a whole step."""

import torch
from torch import Tensor


def whiten(values: Tensor, loss_mask: Tensor, *, std_eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + std_eps) over the trainable entries, var with n - 1 in the denominator.

    Departure from common code: (1) a single entry, and entries that are all equal, give 0.

    Args: values E*; loss_mask E*, bool; std_eps added to the variance. Returns E*, 0 where masked; at least float32, no
    gradient. Raises ValueError for shapes that differ.

    >>> [round(x, 4) for x in whiten(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4, dtype=torch.bool)).tolist()]
    [-1.1619, -0.3873, 0.3873, 1.1619]
    """
    if values.shape != loss_mask.shape:
        raise ValueError(
            f"values and loss_mask must share a shape, got {tuple(values.shape)} and {tuple(loss_mask.shape)}."
        )
    found = torch.zeros_like(values, dtype=torch.float64)
    chosen = values.detach()[loss_mask].double()
    if chosen.numel() > 1 and not bool(chosen.max() == chosen.min()):  # NaN differs from itself: not hidden
        found[loss_mask] = (chosen - chosen.mean()) * (chosen.var() + std_eps).rsqrt()
    return found.to(torch.promote_types(values.dtype, torch.float32))
