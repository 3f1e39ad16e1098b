"""How the sequences of a micro-batch are laid out for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strop.data.batch import Batch
from strop.trainers.sharing import RowSizes, Unit, Units, prompt_lengths

LayoutKind = Literal["padded", "packed", "shared", "left_padded"]  # left_padded: for models and tests that need it


@dataclass(frozen=True)
class Layout:
    """Inputs of a model, and the place of each flat token in them."""

    input_ids: Tensor  # B x L
    attention_mask: (
        Tensor | None
    )  # B x L, True = real; B x L x L, True = query sees key; None where causality is enough
    position_ids: Tensor  # B x L
    places: Tensor  # T: index of flat token t in input_ids.flatten(); those of a shared prompt have one place
    before: Tensor  # T: index of the position that token t is predicted at; of a sequence's first token it says nothing


def lay_out(batch: Batch, kind: LayoutKind, rows: RowSizes | None = None) -> Layout:
    """Lay a micro-batch out.

    padded: one row a sequence, padding on the right, where no real token can see it; no mask needed.
    left_padded: padding on the left, masked.
    packed: rows with sequences end to end; positions restart, which is how transformers models know where one begins.
    shared: as packed, but sequences of one prompt stand side by side and have it once: prompt, response, response, ... A
        response sees the prompt and itself, and its positions go on from the prompt's.

    Args: rows, of packed and shared ones what stands in each, as a Cut says it; None puts all into one row.
    """
    if kind in ("packed", "shared"):
        shares = kind == "shared"
        in_rows = [Units(batch, shares=shares).within()] if rows is None else _units_in_rows(batch, rows, shares=shares)
        return _end_to_end(in_rows, batch, kind)
    lengths = torch.tensor(batch.lengths)
    column = torch.arange(batch.tokens.numel()) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
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
    return Layout(input_ids.view(len(lengths), width), mask, positions, places, places - 1)


def _units_in_rows(batch: Batch, rows: RowSizes, *, shares: bool) -> list[list[Unit]]:
    prompts = prompt_lengths(batch) if shares else [0] * batch.num_sequences
    found: list[list[Unit]] = []
    first = 0
    for sizes in rows:
        found.append([])
        for size in sizes:
            sequences = list(range(first, first + size))
            found[-1].append(Unit.of(sequences, prompts[first], batch.lengths))
            first += size
    return found


def _end_to_end(rows: list[list[Unit]], batch: Batch, kind: LayoutKind) -> Layout:
    """Units end to end in each row, padding behind them."""
    size, count = max(sum(unit.width for unit in row) for row in rows), len(rows)
    places, before = torch.empty(2, batch.tokens.numel(), dtype=torch.int64)
    positions = torch.zeros(count * size, dtype=torch.int64)  # 0 in padding: each a sequence of its own
    segments, owners = torch.full(
        (2, count * size), -1
    )  # sequence of a position behind its prompt, and first of its unit
    for row, units in enumerate(rows):
        base = row * size
        for unit in units:
            end = base + unit.prefix
            for sequence in unit.sequences:
                first, length = batch.starts[sequence], batch.lengths[sequence]
                own = length - unit.prefix
                at = torch.cat([torch.arange(base, base + unit.prefix), torch.arange(end, end + own)])
                places[first : first + length] = at
                before[first : first + length] = torch.cat([at[:1] - 1, at[:-1]])
                positions[at] = torch.arange(length)
                segments[at[unit.prefix :]] = sequence
                owners[at] = unit.sequences[0]
                end += own
            base += unit.width
    input_ids = torch.zeros(count * size, dtype=torch.int64)
    input_ids[places] = batch.tokens
    shape = (count, size)
    mask = _mask(owners.view(shape), segments.view(shape)) if kind == "shared" else None
    return Layout(input_ids.view(shape), mask, positions.view(shape), places, before)


def _mask(owners: Tensor, segments: Tensor) -> Tensor:
    """B x L x L: a position sees itself and, of its unit, the prompt and its own response, as far as they stand before it.
    A prompt has segment -1; so has padding, which sees padding alone."""
    same_unit = owners[:, :, None] == owners[:, None, :]
    visible = (segments[:, None, :] == -1) | (segments[:, :, None] == segments[:, None, :])
    return (same_unit & visible).tril()
