"""A softmax over a vocabulary that is looked at part by part: chunks of it one after the other, or split over the ranks of a
process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SUMMARY_SIZE = 4  # numbers a token


def summary(z: Tensor, columns: Tensor, *, with_entropy: bool) -> Tensor:
    """What must be known of a part's logits z [t, size], [t, 4]: their maximum m, sum_v exp(z_v - m), if asked for
    sum_v exp(z_v - m) (z_v - m), and the target's logit, 0 where its column is in another part. Writes over z."""
    found = z.new_zeros(len(z), SUMMARY_SIZE)
    if not z.shape[1]:
        found[:, 0] = -torch.inf
        return found
    at, is_here = _places(columns, z.shape[1])
    found[:, 3] = torch.where(is_here, z.gather(-1, at[:, None]).squeeze(-1), 0.0)
    found[:, 0] = largest = z.amax(-1)
    below = z.sub_(largest[:, None])
    share = below.exp() if with_entropy else below.exp_()
    found[:, 1] = share.sum(-1)
    if with_entropy:
        found[:, 2] = share.mul_(below).sum(-1)
    return found


def merged(parts: Sequence[Tensor]) -> Tensor:
    """The summary [t, 4] of several parts together."""
    if len(parts) == 1:
        return parts[0]
    largest, total, below, target = torch.stack(list(parts)).unbind(-1)  # [parts, t] each
    top = largest.amax(0)
    shift = torch.where(total > 0, largest - top, -1.0)  # a part without columns has neither
    share = torch.where(total > 0, shift.exp(), 0.0)
    return torch.stack([top, (share * total).sum(0), (share * (below + total * shift)).sum(0), target.sum(0)], -1)


def outcome(whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [T], entropies [T] and the two numbers a token that make a logit a log-probability [T, 2], from the
    summary of the whole vocabulary. With M, s, e and z its numbers

        logprob = (z - M) - log s
        entropy = log s - e / s

    Differences of large numbers are taken first, as log_softmax does."""
    top, total, below, target = whole.unbind(-1)
    log_total = total.log()
    return target - top - log_total, log_total - below / total, torch.stack([top, log_total], -1)


def log_softmax_(z: Tensor, normalizer: Tensor) -> Tensor:
    """Log-probabilities of a part's logits z [t, size], in their place, by what `outcome` says of these tokens."""
    top, log_total = normalizer.unbind(-1)
    return z.sub_(top[:, None]).sub_(log_total[:, None])


def add_at(grad: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values [t] to grad [t, size] at the targets' columns, those that are in this part."""
    if grad.shape[1]:
        at, is_here = _places(columns, grad.shape[1])
        grad.scatter_add_(-1, at[:, None], torch.where(is_here, values, 0.0)[:, None])


def _places(columns: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Columns of the targets in a part of such a size, and which targets are in it; of others it says some column."""
    return columns.clamp(0, size - 1), (columns >= 0) & (columns < size)


@dataclass(frozen=True)
class VocabularyPart:
    """The ids of this process: all of them, or where a group shares them, those from `first` on."""

    group: ProcessGroup | None
    first: int

    @classmethod
    def of(cls, weight: Tensor, targets: Tensor, group: ProcessGroup | None) -> VocabularyPart:
        """The part that rows of the head are, those of the group's rank 0 the first ones.

        Raises:
            ValueError: a target that is no id of any rank.
        """
        sizes, rank = [len(weight)], 0
        if group is not None:
            mine = torch.tensor(sizes, device=weight.device)
            found = [torch.empty_like(mine) for _ in range(group.size())]
            dist.all_gather(found, mine, group=group)
            sizes, rank = [int(size) for size in found], group.rank()
        if targets.numel():
            lowest, highest = (int(target) for target in targets.aminmax())
            if lowest < 0 or highest >= sum(sizes):
                raise ValueError(f"targets must be ids from 0 to {sum(sizes) - 1}, got {lowest} to {highest}.")
        return cls(group, sum(sizes[:rank]))

    def columns(self, targets: Tensor) -> Tensor:
        """Of the targets, as if this part went on for ever in both directions."""
        return targets - self.first

    def gathered(self, mine: Tensor) -> Tensor:
        """The summary [T, 4] of all ranks' parts."""
        if self.group is None:
            return mine
        found = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(found, mine, group=self.group)
        return merged(found)

    def add_up(self, share: Tensor) -> None:
        """Make a tensor the sum of all ranks'."""
        if self.group is not None:
            dist.all_reduce(share, group=self.group)
