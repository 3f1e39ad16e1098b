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


class Units:
    """The units of a batch, sequences of one group side by side; what they are made of is read from the batch once.

    Args: shares, False where each sequence is a unit of its own.
    """

    def __init__(self, batch: Batch, *, shares: bool) -> None:
        self._lengths, self._shares = batch.lengths, shares
        starts = torch.tensor(batch.starts, dtype=torch.int64)
        self._groups: list[int] = batch.group_ids[starts].tolist()
        self._order = sorted(range(batch.num_sequences), key=lambda s: self._groups[s])
        if shares:
            tokens = batch.tokens.tolist()
            self._prompts = prompt_lengths(batch)
            self._tokens = [
                tokens[first : first + size] for first, size in zip(batch.starts, self._lengths, strict=True)
            ]

    def within(self, width: int | None = None) -> list[Unit]:
        """A sequence that follows another of its prompt joins its unit, while that stays within `width`; None: always."""
        if not self._shares:
            return [Unit.of([s], 0, self._lengths) for s in self._order]
        units: list[Unit] = []
        for sequence in self._order:
            if units and self._joins(units[-1], sequence, width):
                units[-1].sequences.append(sequence)
                units[-1].width += self._lengths[sequence] - units[-1].prefix
            else:
                units.append(Unit.of([sequence], self._prompts[sequence], self._lengths))
        return units

    def _joins(self, unit: Unit, sequence: int, width: int | None) -> bool:
        """Is it of the unit's group, and does it begin with the unit's whole prompt and train none of it?"""
        first, size = unit.sequences[0], unit.prefix
        if width is not None and unit.width + self._lengths[sequence] - size > width:
            return False
        is_of_group = self._groups[sequence] == self._groups[first] and self._prompts[sequence] >= size
        return is_of_group and self._tokens[sequence][:size] == self._tokens[first][:size]


def prompt_lengths(batch: Batch) -> list[int]:
    """Tokens of each sequence before its first trainable one; all of them where it has none."""
    found = torch.tensor(batch.lengths, dtype=torch.int64)
    trainable = batch.loss_mask.nonzero().flatten()
    sequences = batch.sequence_ids[trainable]
    columns = trainable - torch.tensor(batch.starts, dtype=torch.int64)[sequences]
    return found.scatter_reduce(0, sequences, columns, "amin").tolist()
