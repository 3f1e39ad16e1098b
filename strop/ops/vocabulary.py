"""A softmax over a vocabulary that is split over the ranks of a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SUMMARY_SIZE = 4  # numbers a token that a rank tells the others


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's ids: `size` of them, from `first` on."""

    group: ProcessGroup
    first: int
    size: int

    @classmethod
    def of(cls, weight: Tensor, targets: Tensor, group: ProcessGroup) -> VocabularyPart:
        """The part that rows of the head are, those of the group's rank 0 the first ones.

        Raises:
            ValueError: a target that is no id of any rank.
        """
        mine = torch.tensor([len(weight)], device=weight.device)
        found = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(found, mine, group=group)
        sizes = [int(size) for size in found]
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < sum(sizes):
            raise ValueError(
                f"targets must be ids from 0 to {sum(sizes) - 1}, got {int(targets.min())} to {int(targets.max())}."
            )
        return cls(group, sum(sizes[: group.rank()]), len(weight))

    def summary(self, z: Tensor, targets: Tensor, *, with_entropy: bool) -> Tensor:
        """What others need to know of this rank's logits z [t, size], [t, 4]: their maximum m, sum_v exp(z_v - m), if asked for
        sum_v exp(z_v - m) (z_v - m), and the target's logit, 0 where it is another rank's."""
        found = z.new_zeros(len(z), SUMMARY_SIZE)
        if not self.size:
            found[:, 0] = -torch.inf
            return found
        at, is_mine = self._places(targets)
        largest = z.amax(-1, keepdim=True)
        below = z - largest
        share = below.exp()
        found[:, 0] = largest.squeeze(-1)
        found[:, 1] = share.sum(-1)
        if with_entropy:
            found[:, 2] = (share * below).sum(-1)
        found[:, 3] = torch.where(is_mine, z.gather(-1, at[:, None]).squeeze(-1), 0.0)
        return found

    def combined(self, mine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities [T], entropies [T] and the two numbers a token that make a logit a log-probability [T, 2], from
        the summaries of all ranks. With M the largest m and L = log of sum_r s_r exp(m_r - M)

            logprob = (z_target - M) - L
            entropy = -sum_r exp(m_r - M - L) (e_r + s_r (m_r - M - L))

        Differences of large numbers are taken first, as log_softmax does."""
        found = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(found, mine, group=self.group)
        largest, total, below, target = torch.stack(found).unbind(-1)  # [ranks, T] each
        top = largest.amax(0)
        log_total = (total * (largest - top).exp()).sum(0).log()
        shift = torch.where(total > 0, largest - top - log_total, -1.0)  # a rank without rows has neither
        entropy = -(torch.where(total > 0, shift.exp(), 0.0) * (below + total * shift)).sum(0)
        return target.sum(0) - top - log_total, entropy, torch.stack([top, log_total], -1)

    @staticmethod
    def log_softmax(z: Tensor, normalizer: Tensor) -> Tensor:
        """Log-probabilities of this rank's logits z [t, size], in their place, by what `combined` says of these tokens."""
        top, log_total = normalizer.unbind(-1)
        return z.sub_(top[:, None]).sub_(log_total[:, None])

    def add_at(self, grad: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add values [t] to grad [t, size] at the targets that are this rank's."""
        if self.size:
            at, is_mine = self._places(targets)
            grad.scatter_add_(-1, at[:, None], torch.where(is_mine, values, 0.0)[:, None])

    def _places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the targets, and which targets are this rank's; of others it says some column."""
        columns = targets - self.first
        return columns.clamp(0, self.size - 1), (columns >= 0) & (columns < self.size)

    def add_up(self, share: Tensor) -> None:
        """Make a tensor the sum of all ranks'."""
        dist.all_reduce(share, group=self.group)
