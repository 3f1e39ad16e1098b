"""How the sequences of a micro-batch are laid out for one forward pass, and how a step is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strop.data.batch import Batch

LayoutKind = Literal["padded", "packed", "left_padded"]  # left_padded: for models and tests that need it


@dataclass(frozen=True)
class Layout:
    """Inputs of a model, and the place of each flat token in them."""

    input_ids: Tensor  # B x L
    attention_mask: Tensor | None  # B x L, True = real; None where causality alone keeps padding out
    position_ids: Tensor  # B x L
    places: Tensor  # T: index of flat token t in input_ids.flatten()


def lay_out(batch: Batch, kind: LayoutKind) -> Layout:
    """Lay a micro-batch out.

    padded: one row a sequence, padding on the right, where no real token can see it; no mask needed.
    left_padded: padding on the left, masked.
    packed: one row, sequences end to end; positions restart, which is how transformers models know where one begins.
    """
    lengths = torch.tensor(batch.lengths)
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(batch.tokens.numel()) - starts.repeat_interleave(lengths)
    if kind == "packed":
        return Layout(batch.tokens[None], None, column[None], torch.arange(batch.tokens.numel()))
    width = int(lengths.max())
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    if kind == "left_padded":
        column = column + (width - lengths).repeat_interleave(lengths)
    places = row * width + column
    input_ids = torch.zeros(len(lengths) * width, dtype=torch.int64)
    input_ids[places] = batch.tokens
    positions = torch.arange(width).expand(len(lengths), width)
    mask = None
    if kind == "left_padded":
        positions = (positions - (width - lengths)[:, None]).clamp(min=0)
        mask = torch.arange(width)[None] >= (width - lengths)[:, None]
    return Layout(input_ids.view(len(lengths), width), mask, positions, places)


def cut(lengths: Sequence[int], *, max_tokens: int, kind: LayoutKind) -> list[list[int]]:
    """Cut sequences into micro-batches of at most `max_tokens` positions, padding included. Longest first, so that
    rows of one micro-batch have like lengths. A sequence longer than the budget goes alone.

    >>> cut([3, 9, 8, 2], max_tokens=18, kind="padded")
    [[1, 2], [0, 3]]
    """
    parts: list[list[int]] = []
    used = 0
    for sequence in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        longest = lengths[parts[-1][0]] if parts else 0
        cost = lengths[sequence] if kind == "packed" else longest
        if parts and used + cost <= max_tokens:
            parts[-1].append(sequence)
            used += cost
        else:
            parts.append([sequence])
            used = lengths[sequence]
    return parts


def padding_share(lengths: Sequence[int], *, max_tokens: int, kind: LayoutKind) -> float:
    """Which share of the positions of a step's forward passes is padding.

    >>> round(padding_share([3, 9, 8, 2], max_tokens=18, kind="padded"), 4)  # 9 + 9 + 3 + 3 positions, 22 tokens
    0.0833
    """
    if kind == "packed":
        return 0.0
    parts = cut(lengths, max_tokens=max_tokens, kind=kind)
    positions = sum(len(part) * max(lengths[s] for s in part) for part in parts)
    return 1 - sum(lengths) / positions
