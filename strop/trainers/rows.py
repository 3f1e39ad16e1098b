"""A model that reads rows of tokens: what the policy's scorer and the critic's have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from strop.data.batch import Batch
from strop.trainers.attention import attends_to_all
from strop.trainers.layout import Layout, LayoutKind
from strop.trainers.sharding import Within
from strop.types import ModelError, model_failure

T = TypeVar("T")


class RowReader(ABC):
    """One causal model on its device, and what must hold for rows with several sequences in them.

    Args:
        model: a Hugging Face model.
        within: of a sharded one, what its passes are made within.
    """

    def __init__(self, model: Any, within: Within | None = None) -> None:
        self.model, self._within = model, within
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = model.dtype if within is None else within.dtype  # that it computes in

    def _run(self, work: Callable[[], T]) -> T:
        """A pass through the model."""
        return work() if self._within is None else self._within(work)

    def _part(self, number: int) -> slice:
        """Of so many tokens, those whose numbers this rank computes of their hidden states."""
        context = None if self._within is None else self._within.context
        return slice(None) if context is None else context.part(number)

    def _joined(self, mine: Tensor, number: int) -> Tensor:
        """The numbers of so many tokens, of which this rank has its part."""
        context = None if self._within is None else self._within.context
        return mine if context is None else context.joined(mine, number)

    @abstractmethod
    def idle(self) -> Tensor:
        """A pass whose number has gradient 0, for a rank that has no micro-batch left while others have."""

    @abstractmethod
    def _read(self, ids: list[int], positions: list[int] | None = None, mask: Tensor | None = None) -> Tensor:
        """Numbers of each position of one row [L, ...]; without positions as the model places tokens itself, with a mask
        [1, 1, L, L] as it says."""

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Around rows of a few tokens that show what kind of model it is: whatever it raises becomes a ModelError."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:  # another library's model raises whatever it likes
            raise model_failure(error, self.model, "a row of 4 tokens") from error

    def check_causal(self) -> None:
        """Raises ModelError where a token sees later ones."""
        if not self._is_causal():
            raise ModelError(
                f"{type(self.model).__name__} is no causal language model as it is configured: what it says of a token "
                "depends on tokens that come later."
            )

    def explaining(self, batch: Batch, layout: LayoutKind | None = None) -> AbstractContextManager[None]:
        """Forward or backward of a micro-batch: what the model raises becomes a ModelError that says at which input."""
        return explaining(self.model, batch, layout)

    def _inputs(self, laid: Layout) -> dict[str, Any]:
        return {
            "input_ids": laid.input_ids.to(self.device),
            "attention_mask": None if laid.attention_mask is None else self._mask(laid.attention_mask),
            "position_ids": laid.position_ids.to(self.device),
            "use_cache": False,
        }

    def _mask(self, sees: Tensor) -> Tensor:
        """B x L as it is; B x L x L as what is added to attention scores [B, 1, L, L], which every kind of attention takes."""
        sees = sees.to(self.device)
        if sees.dim() == 2:
            return sees
        added = torch.zeros(sees.shape, dtype=self.dtype, device=self.device)
        return added.masked_fill_(~sees, torch.finfo(self.dtype).min)[:, None]

    @torch.no_grad()
    def fault_of(self, layout: Literal["packed", "shared"]) -> str:
        """What goes wrong in rows with several sequences in them, seen on numbers; "" if nothing."""
        try:
            return self._packing_fault() if layout == "packed" else self._sharing_fault()
        except Exception as error:  # noqa: BLE001 - another library's model raises whatever it likes
            return f"{type(error).__name__}: {error}"

    def _sharing_fault(self) -> str:
        """What goes wrong where the prompt [0 1 2] has the responses [1 0] and [2 1 0] in one row, or [3 3] for the first."""
        if not attends_to_all(self.model):
            return "its layers do not all attend to everything before them, and a prepared mask would take the place of theirs"
        positions, own = [0, 1, 2, 3, 4, 3, 4, 5], [0, 0, 0, 1, 1, 2, 2, 2]
        segment = torch.tensor(own)
        sees = ((segment == 0)[None, :] | (segment[:, None] == segment[None, :])).tril()[None]
        alone = torch.cat([self._read([0, 1, 2, 1, 0])[3:], self._read([0, 1, 2, 2, 1, 0])[3:]])
        rows = [[0, 1, 2, *first, 2, 1, 0] for first in ([1, 0], [2, 2])]
        shared, neighbour = (self._read(row, positions, self._mask(sees))[3:] for row in rows)
        if not are_equal(alone, shared, rounding=1e-4):  # products in other shapes
            return f"under a prepared mask sequences are not read as they are alone (off by {gap(alone, shared):.2g})"
        everything = torch.ones_like(sees).tril()
        seen = gap(*(self._read(row, positions, self._mask(everything))[5:] for row in rows))
        leak = gap(shared[2:], neighbour[2:])
        return f"a response sees the one before it (numbers differ by {leak:.2g})" if leak > seen / 10 else ""

    def _packing_fault(self) -> str:
        """What goes wrong where [0 1 2][1 0] are one row; "" if nothing."""
        first, other = [0, 1, 2], [1, 0, 0]
        alone = self._read([1, 0])
        packed, neighbour = (self._read([*before, 1, 0], [0, 1, 2, 0, 1])[3:] for before in (first, other))
        if not are_equal(alone, packed, rounding=1e-4):  # products in other shapes
            return (
                f"sequences of a packed row are not read as they are alone (numbers differ by {gap(alone, packed):.2g})"
            )
        # Compared with what the tokens before do where they are to be seen: rounding in bfloat16 hides small leaks.
        seen = gap(*(self._read([*before, 1, 0], [0, 1, 2, 3, 4])[3:] for before in (first, other)))
        leak = gap(packed, neighbour)
        return (
            f"sequences see the ones before them in a packed row (numbers differ by {leak:.2g})"
            if leak > seen / 10
            else ""
        )

    @torch.no_grad()
    def _is_causal(self) -> bool:
        """True if another last token leaves the logits before it; rows rely on that, padded on the right without a mask."""
        vocab = self.model.config.get_text_config().vocab_size
        one, other = (self._read([token % vocab for token in ids]) for ids in ([3, 1, 2, 0], [3, 1, 2, 1]))
        leak, seen = gap(one[:-1], other[:-1]), gap(one[-1], other[-1])
        return not leak > seen / 10  # rounding is far below; numbers that are not finite are for the guards


@contextmanager
def explaining(model: Any, batch: Batch, layout: LayoutKind | None = None) -> Iterator[None]:
    """What a pass of a micro-batch raises becomes a ModelError that names the model and says at which input."""
    try:
        yield
    except Exception as error:
        lengths, kind = batch.lengths, "" if layout is None else f"{layout.replace('_', ' ')} "
        rows = f"{len(lengths)} {kind}sequences of up to {max(lengths)} tokens ({sum(lengths)} together)"
        option = "trainer.max_tokens_per_micro_batch"
        if len(lengths) == 1:  # a smaller micro-batch there is not
            rows, option = (
                f"a sequence of {lengths[0]} tokens (alone in its micro-batch)",
                "the length of sequences",
            )
        raise model_failure(error, model, rows, option=option) from error


def are_equal(one: Tensor, other: Tensor, *, rounding: float = 1e-5) -> bool:
    """Equal up to rounding, as a share of the largest number; that of a narrow type is wider."""
    if one.dtype in (torch.bfloat16, torch.float16):
        rounding = 2e-2
    return gap(one, other) <= rounding * float(other.abs().max())


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def idle_batch() -> Batch:
    """One trainable token, for a pass that learns nothing."""
    return row_batch(torch.zeros(2, dtype=torch.int64))


def row_batch(row: Tensor) -> Batch:
    """One sequence of these ids, whose tokens but the first are trainable, with weight 0."""
    zeros, ids = torch.zeros(len(row)), torch.zeros(len(row), dtype=torch.int64)
    mask = torch.arange(len(row)) > 0
    return Batch(row, ids, ids, mask, zeros, zeros, zeros.double(), ("a pass that learns nothing",))
