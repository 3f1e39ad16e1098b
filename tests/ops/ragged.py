"""Ragged sequences with masked tokens anywhere in them, for losses that look at whole sequences."""

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st

F64 = torch.float64

# One sequence: its advantage and its tokens as (logprob, log-ratio, is trainable). Log-ratios stay far from the clamp at
# +-20. Advantages lie on a grid, so that a product with one is 0 only where the advantage is.
SEQUENCES = st.lists(
    st.tuples(
        st.integers(-128, 128).map(lambda x: x / 64),
        st.lists(st.tuples(st.floats(-8, -0.01), st.floats(-2, 2), st.booleans()), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=5,
)


class Tokens(NamedTuple):
    """What a loss of whole sequences is called with, in this order."""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor

    def at(self, rows):
        """These tokens alone, with a gradient of their own."""
        picked = Tokens(*(x.detach()[rows] for x in self))
        picked.logprobs.requires_grad_()
        return picked


def flat(sequences, *, planted=None, dtype=F64):
    """All tokens end to end, every sequence's id three above the last; `planted` stands in every masked slot."""
    rows = [(s, a, *token) for s, (a, tokens) in enumerate(sequences) for token in tokens]

    def column(of):
        numbers = [of(*row) if row[4] or planted is None else planted for row in rows]
        return torch.tensor(numbers, dtype=dtype)

    return Tokens(
        logprobs=column(lambda s, a, x, d, m: x).requires_grad_(),
        old_logprobs=column(lambda s, a, x, d, m: x - d),
        advantages=column(lambda s, a, x, d, m: a),
        loss_mask=torch.tensor([row[4] for row in rows]),
        sequence_ids=torch.tensor([3 * row[0] + 1 for row in rows]),
    )


def log_ratios(tokens):
    """logprob - old_logprob of a sequence's trainable tokens, rounded as the tensors round it."""
    return [x - (x - d) for x, d, is_trainable in tokens if is_trainable]


def mean(numbers):
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def spread(tokens, numbers):
    """One number per trainable token, 0 at the masked ones."""
    left = iter(numbers)
    return [next(left) if is_trainable else 0.0 for _, _, is_trainable in tokens]


def gradient(loss, logprobs):
    return torch.autograd.grad(loss.sum(), logprobs)[0]
