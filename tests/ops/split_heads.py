"""A head whose rows are divided over ranks, for tests of the ranks."""

import torch
import torch.distributed as dist
from ops.test_linear_logprobs import LargestTensor

from strop.ops import linear_logprobs
from strop.trainers.ranks import everywhere


def weighed(found):
    """A scalar that gives every token another gradient, and entropy another one than the log-probability."""
    logprobs, entropy = found
    places = torch.arange(1, len(logprobs) + 1, dtype=logprobs.dtype).sin()
    return (places * logprobs).sum() + (0 if entropy is None else (places.flip(0) * entropy).sum())


def outcome(hidden, weight, bias, targets, **more):
    """Log-probabilities, entropies, and the gradients to hidden states, weight and bias."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (hidden, weight, bias)]
    found = linear_logprobs(*leaves[:2], targets, bias=leaves[2], **more)
    weighed(found).backward()
    return [
        None if t is None else t.detach() for t in (*found, *(None if leaf is None else leaf.grad for leaf in leaves))
    ]


class SplitHead:
    """Each rank has some rows of the head: as a learner of the trainer is, so that rank 0's call is made in all."""

    def __init__(self, model, *, ranks):
        self.ranks, self.largest = ranks, 0
        self._groups = {n: dist.new_group(list(range(n))) for n in range(1, ranks.size + 1)}

    @everywhere
    def outcomes(self, hidden, weight, bias, targets, *, sizes, **more):
        """`outcome` of each of the first ranks, as many as there are sizes; or the words of the ValueError that all raise."""
        found, rank = None, self.ranks.rank
        if rank < len(sizes):
            mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            rows = None if bias is None else bias[mine]
            try:
                with LargestTensor() as largest:
                    found = outcome(hidden, weight[mine], rows, targets, group=self._groups[len(sizes)], **more)
                self.largest = largest.numel
            except ValueError as error:
                found = str(error)
        return self.ranks.collected(found)[: len(sizes)]
