"""Discounted sums over the steps of each sequence, in a number of passes that grows with the logarithm of its length."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(values: Tensor, sequence_ids: Tensor, factor: Tensor) -> Tensor:
    """y_t = x_t + f y_next, over the entries of each sequence; the last entry of a sequence is its x.

    Doubling: after pass k an entry holds the first 2^k terms of its sum, and the next pass adds those of the entry 2^k
    further on, times f^(2^k).

    Args: values N, float; sequence_ids N, int, the entries of a sequence in their order, sequences in any; factor N, one
    number per sequence. Returns N, in the type of values.

    >>> discounted_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1]), torch.full((3,), 0.5)).tolist()
    [2.0, 2.0, 4.0]
    """
    order = sequence_ids.argsort(stable=True)
    ids, found, power = sequence_ids[order], values[order], factor[order]
    longest = int(ids.unique_consecutive(return_counts=True)[1].max()) if ids.numel() else 0
    distance = 1
    while distance < longest:
        same = ids[:-distance] == ids[distance:]
        added = torch.where(same, power[:-distance] * found[distance:], torch.zeros_like(found[distance:]))
        found = torch.cat([found[:-distance] + added, found[-distance:]])
        power = power.square()
        distance *= 2
    result = torch.empty_like(found)
    result[order] = found
    return result


def next_values(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """The value of the next entry of the same sequence, 0 after the last. Arguments as those of `discounted_sums`.

    >>> next_values(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1])).tolist()
    [2.0, 0.0, 0.0]
    """
    order = sequence_ids.argsort(stable=True)
    ids, sorted_values = sequence_ids[order], values[order]
    following = torch.zeros_like(sorted_values)
    following[:-1] = torch.where(ids[:-1] == ids[1:], sorted_values[1:], following[:-1])
    result = torch.empty_like(following)
    result[order] = following
    return result
