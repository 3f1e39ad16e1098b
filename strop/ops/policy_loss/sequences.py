"""Sums and means over the trainable tokens of a sequence, spread back over its tokens; with gradient."""

import torch
from torch import Tensor


def checked_sequences(logprobs: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> None:
    """Refuse masks and ids that do not fit the tokens."""
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool, got {loss_mask.dtype}. Compare with 0 first.")
    if not logprobs.shape == loss_mask.shape == sequence_ids.shape:
        raise ValueError(
            f"logprobs, loss_mask and sequence_ids must share a shape, got {tuple(logprobs.shape)}, "
            f"{tuple(loss_mask.shape)} and {tuple(sequence_ids.shape)}."
        )


def sequence_sum(values: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Sum over the trainable tokens of its sequence, at every token. Masked values are selected out before the sum.

    >>> sequence_sum(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False]), torch.tensor([0, 0, 0])).tolist()
    [3.0, 3.0, 3.0]
    """
    _, inverse = sequence_ids.flatten().unique(return_inverse=True)
    clean = torch.where(loss_mask, values, torch.zeros_like(values)).flatten()
    count = int(inverse.max()) + 1 if inverse.numel() else 0
    totals = torch.zeros(count, dtype=values.dtype, device=values.device).index_add(0, inverse, clean)
    return totals[inverse].view(values.shape)


def sequence_mean(values: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Mean over the trainable tokens of its sequence, at every token; 0 where a sequence has none."""
    lengths = sequence_sum(loss_mask.to(values.dtype), loss_mask, sequence_ids)
    return sequence_sum(values, loss_mask, sequence_ids) / lengths.clamp(min=1)


def zero_where_masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """0, without gradient, at masked tokens: what is there, NaN included, never reaches the loss."""
    return torch.where(loss_mask, values, torch.zeros_like(values))
