"""Token weights: every way to average a loss is one weight per token, computed once over the whole optimizer step."""

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"]


def token_weights(
    loss_mask: Tensor,
    sequence_ids: Tensor,
    *,
    reduction: Reduction,
    group_ids: Tensor | None = None,
    max_response_tokens: int | None = None,
) -> Tensor:
    """Weight of each token, so that `(weights * loss).sum()` over any cut of the step adds up to the reduction.

        token_mean       1 / (trainable tokens of the step)
        sequence_mean    1 / (sequences of the step x trainable tokens of its sequence)
        prompt_mean      1 / (prompts of the step x trainable tokens of its prompt)
        constant_length  1 / (sequences of the step x max_response_tokens)

    Sources: token_mean as in DAPO (arXiv:2503.14476) eq. 8, sequence_mean as in DeepSeekMath (arXiv:2402.03300) eq. 3,
    constant_length as in Dr.GRPO (arXiv:2503.20783). Sequences and prompts without a trainable token are not counted.

    Args:
        loss_mask: T, bool, True = trainable.
        sequence_ids: T, int. Parts of one rollout share an id and count once.
        reduction: which mean.
        group_ids: T, int, the prompt of each token; for prompt_mean.
        max_response_tokens: the constant of constant_length, >= 1.

    Returns:
        T, float64, 0 where the mask is False.

    Raises:
        ValueError: shapes differ, or the reduction lacks what it needs.

    >>> mask, ids = torch.tensor([True, True, True, True]), torch.tensor([0, 1, 1, 1])
    >>> [round(x, 4) for x in token_weights(mask, ids, reduction="sequence_mean").tolist()]
    [0.5, 0.1667, 0.1667, 0.1667]
    """
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask must be bool, got {loss_mask.dtype}. Compare with 0 first.")
    if loss_mask.shape != sequence_ids.shape:
        raise ValueError(
            f"loss_mask and sequence_ids must share a shape, got {tuple(loss_mask.shape)} and {tuple(sequence_ids.shape)}."
        )
    if reduction == "prompt_mean" and (group_ids is None or group_ids.shape != loss_mask.shape):
        found = None if group_ids is None else tuple(group_ids.shape)
        raise ValueError(f"reduction = prompt_mean needs group_ids of shape {tuple(loss_mask.shape)}, got {found}.")
    if reduction == "constant_length" and (max_response_tokens is None or max_response_tokens < 1):
        raise ValueError(f"reduction = constant_length needs max_response_tokens >= 1, got {max_response_tokens}.")
    weights = torch.zeros(loss_mask.shape, dtype=torch.float64, device=loss_mask.device)
    if reduction == "token_mean":
        weights[loss_mask] = 1 / loss_mask.sum().double()
    elif reduction == "sequence_mean":
        weights[loss_mask] = _mean_of_means(sequence_ids[loss_mask])
    elif reduction == "prompt_mean":
        assert group_ids is not None
        weights[loss_mask] = _mean_of_means(group_ids[loss_mask])
    elif reduction == "constant_length":
        assert max_response_tokens is not None
        weights[loss_mask] = 1 / (max(sequence_ids[loss_mask].unique().numel(), 1) * float(max_response_tokens))
    else:
        raise ValueError(
            f"reduction must be token_mean, sequence_mean, prompt_mean or constant_length, got {reduction!r}."
        )
    return weights


def _mean_of_means(ids: Tensor) -> Tensor:
    """1 / (number of different ids x how often this id occurs)."""
    _, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    return 1 / (counts.numel() * counts[inverse].double())
