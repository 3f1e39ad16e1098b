"""From rollouts to tensors: one flat batch, cut by whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from strop.data.demonstrations import Demonstration
from strop.types import Rollout


@dataclass(frozen=True)
class Batch:
    """S sequences laid end to end; every tensor is [T] unless it says otherwise, entry t belongs to token t.

    A sequence of tokens 5 6 | 9 2 (prompt | response) at group 3 is

        tokens            5     6     9     2
        loss_mask         F     F     T     T
        rollout_logprobs  0     0   -.5   -.1
        advantages        .7    .7    .7    .7

    The first token of a sequence is never trainable: nothing predicts it.
    """

    tokens: Tensor  # int64
    sequence_ids: Tensor  # int64, 0 .. S-1, rising
    group_ids: Tensor  # int64, the prompt of each token
    loss_mask: Tensor  # bool, True = trainable
    rollout_logprobs: Tensor  # float32
    advantages: Tensor  # float32
    token_weights: Tensor  # float64, 0 where loss_mask is False
    names: tuple[str, ...]  # [S], how messages call a sequence
    old_logprobs: Tensor | None = None  # float32; None where the step's own logprobs serve
    ref_logprobs: Tensor | None = None  # float32
    old_values: Tensor | None = None  # float32, of the critic before the batch's first update
    returns: Tensor | None = None  # float32, what the critic learns to foresee
    selected: Tensor | None = None  # bool, what the policy loss singles out, decided over a whole step
    is_right: Tensor | None = None  # bool, of a response that is to be made likelier whatever its advantage
    likelihood: Tensor | None = None  # float64, what weighs -logprobs beside the policy loss
    is_fresh: Tensor | None = None  # bool, sampled by the policy as it is at the start of the step; None: all were
    measures_gap: bool = True  # False where the policy has moved since it could be compared with the sampler

    @property
    def num_sequences(self) -> int:
        return len(self.names)

    @property
    def num_trainable_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return torch.bincount(self.sequence_ids, minlength=self.num_sequences).tolist()

    @cached_property
    def starts(self) -> list[int]:
        """Flat position of each sequence's first token."""
        return [end - length for end, length in zip(accumulate(self.lengths), self.lengths, strict=True)]

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(f.name, value) for f in fields(self) if isinstance(value := vars(self)[f.name], Tensor)]

    def positions(self, sequences: Sequence[int]) -> Tensor:
        """Flat positions of these sequences' tokens, in the order given."""
        pieces = [torch.arange(self.starts[s], self.starts[s] + self.lengths[s]) for s in sequences]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)

    def select(self, sequences: Sequence[int]) -> Batch:
        """These sequences, in the order given, with the weights they have in the whole."""
        at = self.positions(sequences)
        counts = torch.tensor([self.lengths[s] for s in sequences], dtype=torch.int64)
        tensors = {name: value[at] for name, value in self._tensors() if name != "sequence_ids"}
        return replace(
            self,
            **tensors,
            sequence_ids=torch.repeat_interleave(torch.arange(len(sequences)), counts),
            names=tuple(self.names[s] for s in sequences),
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; float64 weights become float32, which not every device has otherwise."""
        tensors = {name: value.to(device) for name, value in self._tensors()}
        tensors["token_weights"] = self.token_weights.float().to(device)
        return replace(self, **tensors)


def build_batch(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> Batch:
    """A batch of these rollouts, token weights still 0: they belong to an optimizer step, not to a batch of rollouts."""
    return _flat_batch(
        tokens=[r.tokens for r in rollouts],
        masks=[r.response_mask for r in rollouts],
        rollout_logprobs=[r.rollout_logprobs for r in rollouts],
        group_ids=[r.group_id for r in rollouts],
        advantages=advantages,
        names=tuple(r.name for r in rollouts),
    )


def demonstration_batch(demonstrations: Sequence[Demonstration]) -> Batch:
    """A batch of demonstrations to imitate: advantage 1 on every token of a response."""
    return _flat_batch(
        tokens=[d.tokens for d in demonstrations],
        masks=[d.response_mask for d in demonstrations],
        rollout_logprobs=[(0.0,) * len(d.tokens) for d in demonstrations],
        group_ids=range(len(demonstrations)),
        advantages=[1.0] * len(demonstrations),
        names=tuple(f"demonstration row {d.row}" for d in demonstrations),
    )


def _flat_batch(
    *,
    tokens: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    rollout_logprobs: Sequence[Sequence[float]],
    group_ids: Sequence[int],
    advantages: Sequence[float],
    names: tuple[str, ...],
) -> Batch:
    lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int64)

    def spread(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.repeat_interleave(torch.tensor(list(values), dtype=dtype), lengths)

    loss_mask = _flat(masks, torch.bool)
    loss_mask[(lengths.cumsum(0) - lengths)[lengths > 0]] = False
    return Batch(
        tokens=_flat(tokens, torch.int64),
        sequence_ids=spread(range(len(tokens)), torch.int64),
        group_ids=spread(group_ids, torch.int64),
        loss_mask=loss_mask,
        rollout_logprobs=_flat(rollout_logprobs, torch.float32),
        advantages=spread(advantages, torch.float32),
        token_weights=torch.zeros(loss_mask.shape, dtype=torch.float64),
        names=names,
    )


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
