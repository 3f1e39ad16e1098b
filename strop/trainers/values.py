"""Values of a batch's trainable tokens: the body of a language model with one number as its head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from strop.data.batch import Batch
from strop.trainers.layout import Layout, LayoutKind, lay_out
from strop.trainers.rows import RowReader, idle_batch
from strop.trainers.sharding import Within
from strop.trainers.sharing import RowSizes
from strop.types import ModelError, model_failure


class ValueModel(nn.Module):
    """A Hugging Face body, and a float32 head from its last hidden states to one number; a new head says 0 of everything.

    Args:
        body: a model whose output has `last_hidden_state`, on its device.
    """

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.head = _Head(_width(body), 1, dtype=torch.float32, device=next(body.parameters()).device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of the body."""
        return self.body.dtype

    @property
    def config(self) -> Any:
        """Of the body."""
        return self.body.config

    @property
    def base_model(self) -> Any:
        """The body."""
        return self.body

    @property
    def tp_plan(self) -> dict[str, str]:
        """As transformers says of the body; the head stays whole."""
        return {f"body.{name}": style for name, style in self.body.tp_plan.items()}

    def get_input_embeddings(self) -> nn.Module:
        """Of the body."""
        return self.body.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """There is no head with tokens."""

    @property
    def _no_split_modules(self) -> set[str]:
        """As transformers says of the body; the head's type is its own."""
        return {_Head.__name__, *(self.body._no_split_modules or ())}


class _Head(nn.Linear):
    """From hidden states to one number."""


def _width(body: Any) -> int:
    """Of its last hidden states, which a config has many names for."""
    with torch.no_grad():
        try:
            row = torch.zeros(1, 1, dtype=torch.int64, device=next(body.parameters()).device)
            return body(input_ids=row, use_cache=False).last_hidden_state.shape[-1]
        except Exception as error:  # another library's model raises whatever it likes
            raise model_failure(error, body, "a row of 1 token") from error


def body_of(model: Any) -> Any:
    """A copy of a causal language model without its head.

    Raises:
        ModelError: the model is not made of a body and a head.
    """
    if model.base_model is model:
        raise ModelError(
            f"{type(model).__name__} is not made of a body and a head, so no critic can be made of it: set critic.path to "
            "another model with the same tokens, or use an algorithm.advantage.kind without a critic."
        )
    return copy.deepcopy(model.base_model)


class ValueScorer(RowReader):
    """A ValueModel as a function from a micro-batch to the values of its trainable tokens.

    Raises:
        ModelError: the model cannot run, or a token sees later ones.
    """

    def __init__(self, model: ValueModel, within: Within | None = None) -> None:
        super().__init__(model.body, within)
        self._head = model.head
        with self.probing():
            self.check_causal()

    def __call__(self, batch: Batch, *, layout: LayoutKind, rows: RowSizes | None = None) -> Tensor:
        """Values [N] of the N trainable tokens, float32, in flat order. That of a token is read off the token before it, as
        its log-probability is: it is the value of the state in which the token is chosen."""
        with self.explaining(batch, layout):
            laid = lay_out(batch, layout, rows)
            before = laid.before[batch.loss_mask]
            mine = before[self._part(len(before))].to(self.device)
            return self._run(lambda: self._joined(self._foresee(laid, mine), len(before))).squeeze(-1)

    def _foresee(self, laid: Layout, before: Tensor) -> Tensor:
        hidden = self.model(**self._inputs(laid)).last_hidden_state.flatten(0, 1)[before]
        return self._head(hidden.float())

    def idle(self) -> Tensor:
        return 0.0 * self(idle_batch(), layout="padded").sum()

    def _read(self, ids: list[int], positions: list[int] | None = None, mask: Tensor | None = None) -> Tensor:
        place = {} if positions is None else {"position_ids": torch.tensor([positions], device=self.device)}
        row = torch.tensor([ids], device=self.device)
        given = {"input_ids": row, "attention_mask": mask, "use_cache": False, **place}
        return self._run(lambda: self.model(**given).last_hidden_state[0])
