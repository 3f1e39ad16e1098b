"""How a batch is cut into micro-batches, and in which layout they cost least."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from strop.data.batch import Batch
from strop.products import has_better_library
from strop.trainers.layout import LayoutKind
from strop.trainers.sharing import RowSizes, Unit, Units
from strop.types import Metric, StepMetrics

# What a forward and backward pass costs by itself, in positions: on CPU 45 for a model of .4M weights and 30 for one of 135M.
PASS_POSITIONS = 40
MAX_PADDING_SHARE = 0.05


@dataclass(frozen=True)
class Costs:
    """What positions and pairs of positions cost a model, in multiplications of its matrices and of its attention."""

    position: float = 1.0
    pair: float = 0.0
    max_row: int | None = None  # positions of a row, where the model bounds them


class Part(NamedTuple):
    """A micro-batch: its sequences in the order of its rows, and what stands in each row where that are several."""

    sequences: list[int]
    rows: RowSizes | None = None


@dataclass(frozen=True)
class Cut:
    """The micro-batches of a batch and their layout."""

    kind: LayoutKind
    parts: list[Part]
    positions: int  # computed in all of them, padding included
    padding: int
    cost: float  # in positions

    def metrics(self) -> StepMetrics:
        return {"padding_share": Metric.mean(float(self.padding), self.positions)}


def cheapest(batch: Batch, kinds: Sequence[LayoutKind], *, max_tokens: int, costs: Costs) -> Cut:
    """The cut that costs least, of those with at most 5 % of padding if there are any; of equal ones that of the first kind.
    The cost in positions is

        positions + 40 passes + pairs x (cost of a pair / cost of a position)

    where a row of L positions has L (L + 1) / 2 pairs if it is one sequence, padded, and L^2 under a mask. It depends on
    lengths and prompts alone: the same batch is always cut the same way.
    """
    found = [cut_batch(batch, kind, max_tokens=max_tokens, costs=costs) for kind in kinds]
    return min(found, key=_rank)


def cut_batch(batch: Batch, kind: LayoutKind, *, max_tokens: int, costs: Costs | None = None) -> Cut:
    """Micro-batches of at most `max_tokens` positions, padding included; a longer sequence goes alone.

    Rows with several sequences are as long as the longest sequence or group, or twice, four times, ... as long, chosen as
    `cheapest` does: short rows attend to less, long ones have less padding. Groups too large for a row are divided, and repeat
    their prompt.
    """
    costs = costs or Costs()
    pair = costs.pair / costs.position
    if kind not in ("packed", "shared"):
        return _padded(batch, kind, cut(batch.lengths, max_tokens=max_tokens), pair)
    most = min(max_tokens, costs.max_row or max_tokens)
    units = Units(batch, shares=kind == "shared")
    fitting = [unit.width for unit in units.within(most) if unit.width <= most]
    widths = _widths(batch, fitting, most)
    return min((_in_rows(units.within(width), kind, width, most, max_tokens, pair) for width in widths), key=_rank)


def _rank(one: Cut) -> tuple[bool, float]:
    return one.padding > MAX_PADDING_SHARE * one.positions, one.cost


def _widths(batch: Batch, units: list[int], most: int) -> list[int]:
    """Of rows, worth trying: the longest sequence, the widest unit, and their doubles up to all tokens or the bound."""
    end = min(most, sum(units))
    found = {max(end, 1)}
    for width in (max((n for n in batch.lengths if n <= most), default=most), max(units, default=most)):
        while width < end:
            found.add(width)
            width *= 2
    return sorted(found)


def cut(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Cut sequences into padded micro-batches of at most `max_tokens` positions. Longest first, so that rows of one
    micro-batch have like lengths; a new one begins where padding would cost more than another pass.

    >>> cut([3, 9, 8, 2], max_tokens=18)
    [[1, 2], [0, 3]]
    >>> cut([100, 50, 100], max_tokens=4096)  # 50 positions of padding against 40 of a pass
    [[0, 2], [1]]
    """
    parts: list[list[int]] = []
    padding = 0
    for sequence in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        longest = lengths[parts[-1][0]] if parts else 0
        padding += longest - lengths[sequence]
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens and padding <= PASS_POSITIONS:
            parts[-1].append(sequence)
        else:
            parts.append([sequence])
            padding = 0
    return parts


def shares(batch: Batch, num_ranks: int, costs: Costs, *, by_prompt: bool) -> list[list[int]]:
    """The sequences of each rank, in rising order, so that all ranks have about the same to do: the costliest piece goes to
    the rank that has least, and so on. A piece is a sequence, or with `by_prompt` some that stand in a row behind the prompt
    they share, of up to a quarter of what a rank has. Groups may be torn apart: their advantages are known."""
    if not by_prompt:
        pieces = [([s], length) for s, length in enumerate(batch.lengths)]
    else:
        quarter = max([*batch.lengths, sum(batch.lengths) // (4 * num_ranks)])
        pieces = [(unit.sequences, unit.width) for unit in Units(batch, shares=True).within(quarter)]
    pair = costs.pair / costs.position
    found: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for sequences, width in sorted(pieces, key=lambda piece: (-piece[1], piece[0])):
        least = load.index(min(load))
        found[least] += sequences
        load[least] += width + pair * width * (width + 1) / 2
    return [sorted(share) for share in found]


def _padded(batch: Batch, kind: LayoutKind, parts: list[list[int]], pair: float) -> Cut:
    sizes = [(len(part), max(batch.lengths[s] for s in part)) for part in parts]
    positions = sum(rows * width for rows, width in sizes)
    pairs = sum(rows * width * (width + 1) / 2 for rows, width in sizes)
    padding = positions - sum(batch.lengths)
    cost = positions + PASS_POSITIONS * len(parts) + pair * pairs
    return Cut(kind, [Part(part) for part in parts], positions, padding, cost)


def _in_rows(units: list[Unit], kind: LayoutKind, width: int, most: int, max_tokens: int, pair: float) -> Cut:
    """Units in rows of about `width` positions and at most `most`, and as many rows to a micro-batch as the budget allows."""
    parts = [[[unit]] for unit in units if unit.width > most]
    for row in _even_rows([unit for unit in units if unit.width <= most], width, most):
        longest = _length(parts[-1][0]) if parts else max_tokens + 1  # the first row of a micro-batch
        if longest * (len(parts[-1]) + 1 if parts else 1) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    sizes = [(len(part), _length(part[0])) for part in parts]
    positions = sum(count * size for count, size in sizes)
    padding = positions - sum(unit.width for unit in units)
    cost = positions + PASS_POSITIONS * len(parts) + pair * sum(count * size**2 for count, size in sizes)
    whole = [
        Part(
            [s for row in part for unit in row for s in unit.sequences],
            tuple(tuple(len(unit.sequences) for unit in row) for row in part),
        )
        for part in parts
    ]
    return Cut(kind, whole, positions, padding, cost)


def _even_rows(units: list[Unit], width: int, most: int) -> list[list[Unit]]:
    """Units into rows that end alike, of about `width` positions and at most `most` (MULTIFIT: the smallest length, in steps
    of 2 %, at which so many rows hold them all). The longest row first."""
    if not units:
        return []
    total, ordered = sum(unit.width for unit in units), sorted(units, key=lambda u: -u.width)
    count = -(-total // width)
    length = max(ordered[0].width, -(-total // count))
    while True:
        rows = _filled(ordered, min(length, most))
        if len(rows) <= count or length >= most:
            return sorted(rows, key=lambda row: -_length(row))
        length += 1 + length // 50


def _filled(units: list[Unit], length: int) -> list[list[Unit]]:
    """Units into rows of at most `length`, each into the fullest row that has room for it."""
    rows: list[list[Unit]] = []
    space: list[tuple[int, int]] = []  # left in a row, and which; sorted
    for unit in units:
        at = bisect.bisect_left(space, (unit.width, -1))
        left, row = space.pop(at) if at < len(space) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(unit)
        bisect.insort(space, (left - unit.width, row))
    return rows


def _length(row: list[Unit]) -> int:
    return sum(unit.width for unit in row)


def costs_of(model: torch.nn.Module) -> Costs:
    """Of a Hugging Face model: a weight of the body's matrices is one multiplication a position, embeddings none; each layer
    takes two products of the width of its queries for a pair, which are made by torch's own library where those of a position
    are made by one that is twice as fast. Where a config names no heads a pair costs nothing."""
    settings = model.config.get_text_config()  # type: ignore[union-attr]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    body = model.base_model  # type: ignore[union-attr]
    matrices = sum(p.numel() for p in body.parameters() if p.dim() >= 2 and id(p) not in embeddings)
    layers, heads, width = (
        getattr(settings, name, None) or 0 for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    queries = heads * (getattr(settings, "head_dim", None) or width // heads) if heads else 0
    of_pair = 2.0 * layers * queries * (2 if has_better_library() else 1)
    return Costs(float(max(matrices, 1)), of_pair, _size_of_kept_mask(model))


def _size_of_kept_mask(model: torch.nn.Module) -> int | None:
    """Rows that a model can take where it keeps a causal mask, as GPT-Neo does; positions, which restart, bound no row."""
    masks = [b for b in model.buffers() if b.dtype == torch.bool and b.dim() >= 2 and b.shape[-1] == b.shape[-2]]
    return min((mask.shape[-1] for mask in masks), default=None)
