"""Which sequences share a prompt: units that stand in a row as one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from strop.data.batch import Batch

# What stands in the rows of a micro-batch: of each row, how many sequences each of its units has.
RowSizes = tuple[tuple[int, ...], ...]


@dataclass
class Unit:
    """Sequences that begin with the same `prefix` tokens, none of them trainable; their prompt is there once."""

    sequences: list[int]
    prefix: int  # 0: a sequence by itself
    width: int  # positions that it takes

    @classmethod
    def of(cls, sequences: list[int], prefix: int, lengths: Sequence[int]) -> Unit:
        return cls(sequences, prefix, prefix + sum(lengths[s] - prefix for s in sequences))


def units_of(batch: Batch, *, shares: bool, width: int | None = None) -> list[Unit]:
    """The units of a batch in the order of its sequences. One that follows another of its prompt joins its unit, while that
    stays within `width`.

    Args: shares, False where each sequence is a unit of its own; width, None without bound.
    """
    if not shares:
        return [Unit.of([s], 0, batch.lengths) for s in range(batch.num_sequences)]
    prompts = prompt_lengths(batch)
    groups = [int(batch.group_ids[start]) for start in batch.starts]
    units: list[Unit] = []
    for sequence, length in enumerate(batch.lengths):
        if units:
            unit, first = units[-1], units[-1].sequences[0]
            grown = unit.width + length - unit.prefix
            fits = width is None or grown <= width
            if fits and groups[sequence] == groups[first] and _begins_alike(batch, first, sequence, prompts):
                unit.sequences.append(sequence)
                unit.width = grown
                continue
        units.append(Unit.of([sequence], prompts[sequence], batch.lengths))
    return units


def prompt_lengths(batch: Batch) -> list[int]:
    """Tokens of each sequence before its first trainable one; all of them where it has none."""
    found = torch.tensor(batch.lengths)
    trainable = batch.loss_mask.nonzero().flatten()
    sequences = batch.sequence_ids[trainable]
    columns = trainable - torch.tensor(batch.starts, dtype=torch.int64)[sequences]
    return found.scatter_reduce(0, sequences, columns, "amin").tolist()


def _begins_alike(batch: Batch, one: int, other: int, prompts: list[int]) -> bool:
    """Does a sequence begin with the whole prompt of another, and train none of it?"""
    size = prompts[one]
    if prompts[other] < size:
        return False
    a, b = batch.starts[one], batch.starts[other]
    return bool(torch.equal(batch.tokens[a : a + size], batch.tokens[b : b + size]))
