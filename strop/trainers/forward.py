"""Log-probabilities of a batch's trainable tokens from a Hugging Face causal language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop import ops
from strop.data.batch import Batch
from strop.trainers.cutting import Cut
from strop.trainers.layout import Layout, LayoutKind, lay_out
from strop.trainers.rows import RowReader, are_equal, idle_batch
from strop.trainers.sharding import Within
from strop.trainers.sharing import RowSizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Head inputs of the probe are multiplied by this (a power of two: exact): logits of every model then reach where a soft
# cap, of 30 say, bends them.
_LOUD = 1024.0


class TokenScorer(RowReader):
    """One model as a function from a micro-batch to log-probabilities and entropies of its trainable tokens.

    Where the model is a body and a plain linear head (checked once, on numbers), only hidden states of the wanted
    positions reach the head and all logits are never held; other models go through their own forward pass.

    Raises:
        ModelError: the model cannot run, or a token sees later ones.
    """

    def __init__(self, model: Any, within: Within | None = None) -> None:
        super().__init__(model, within)
        with self.probing():
            self._has_plain_head = self._run(self._head_is_plain)
            self.check_causal()

    def __call__(
        self,
        batch: Batch,
        *,
        temperature: float,
        layout: LayoutKind,
        with_entropy: bool,
        rows: RowSizes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] and entropies [N] of the N trainable tokens of `batch`, in flat order."""
        with self.explaining(batch, layout):
            laid = lay_out(batch, layout, rows)
            return self._run(lambda: self._score(batch, laid, temperature, with_entropy))

    def _score(
        self, batch: Batch, laid: Layout, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        number = int(batch.loss_mask.sum())
        mine = self._part(number)
        predicting = laid.before[batch.loss_mask][mine].to(self.device)
        targets = batch.tokens[batch.loss_mask][mine].to(self.device)
        logprobs, entropy = self._score_targets(laid, predicting, targets, temperature, with_entropy)
        return self._joined(logprobs, number), None if entropy is None else self._joined(entropy, number)

    def _score_targets(
        self, laid: Layout, predicting: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self._has_plain_head:
            weight, bias, group = self._head_rows()
            hidden = rows_at(self._body(laid).flatten(0, 1), predicting).to(weight.dtype)  # some bodies end in float32
            return ops.linear_logprobs(
                hidden, weight, targets, bias=bias, temperature=temperature, with_entropy=with_entropy, group=group
            )
        logits = rows_at(self.model(**self._inputs(laid)).logits.flatten(0, 1), predicting)
        entropy = ops.logits_entropy(logits, temperature=temperature) if with_entropy else None
        return ops.token_logprobs(logits, targets, temperature=temperature), entropy

    def idle(self) -> Tensor:
        numbers, _ = self(idle_batch(), temperature=1.0, layout="padded", with_entropy=False)
        return 0.0 * numbers.sum()

    @torch.no_grad()
    def all_logprobs(self, batch: Batch, cut: Cut, *, temperature: float) -> Tensor:
        """Log-probabilities [T] of the batch's trainable tokens, 0 elsewhere, in the micro-batches of a cut; no gradient."""
        found = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for sequences, rows in cut.parts:
            if not sequences:
                self.idle()
                continue
            part = batch.select(sequences)
            numbers, _ = self(part, temperature=temperature, layout=cut.kind, with_entropy=False, rows=rows)
            found[batch.positions(sequences)[part.loss_mask]] = numbers.float().cpu()
        return found

    def _head_rows(self) -> tuple[Tensor, Tensor | None, ProcessGroup | None]:
        """The head's rows and bias in this rank, and the ranks that have the others."""
        head = self.model.get_output_embeddings()
        return (head.weight, head.bias, None) if self._within is None else self._within.head_rows(head)

    def _body(self, laid: Layout) -> Tensor:
        return self.model.base_model(**self._inputs(laid)).last_hidden_state

    def _read(self, ids: list[int], positions: list[int] | None = None, mask: Tensor | None = None) -> Tensor:
        place = {} if positions is None else {"position_ids": torch.tensor([positions], device=self.device)}
        row = torch.tensor([ids], device=self.device)
        given = {"input_ids": row, "attention_mask": mask, "use_cache": False, **place}
        return self._run(lambda: self.model(**given).logits[0])

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """True if logits are the body's last hidden state times the head's weight, with its bias, and nothing else."""
        vocab = self.model.config.get_text_config().vocab_size
        inputs = {
            "input_ids": torch.arange(4, device=self.device)[None] % vocab,
            "attention_mask": None,
            "position_ids": torch.arange(4, device=self.device)[None],
            "use_cache": False,
        }
        logits = self.model(**inputs).logits  # also where the answer is known: a model that cannot run shows it here
        head, body = self.model.get_output_embeddings(), self.model.base_model
        if not isinstance(head, torch.nn.Linear) or body is self.model:
            return False
        if any(_bends_logits(name, value) for name, value in self.model.config.get_text_config().to_dict().items()):
            return False
        weight, bias = head.weight, head.bias
        if self._within is not None:
            weight, bias = self._within.whole(weight), None if bias is None else self._within.whole(bias)
        hidden = body(**inputs).last_hidden_state.to(weight.dtype)
        if hidden.shape[-1] != weight.shape[1]:
            return False
        handle = head.register_forward_pre_hook(lambda _, given: (given[0] * _LOUD,))
        try:
            loud = self.model(**inputs).logits
        finally:
            handle.remove()
        plain, plainly_loud = (torch.nn.functional.linear(h, weight, bias) for h in (hidden, hidden * _LOUD))
        return are_equal(plain, logits) and are_equal(plainly_loud, loud)


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """rows[places]. The last token of a prompt predicts the first one of each of its responses, and the gradients of a place
    are summed in the order of its uses; on a CPU threads would add those of rows[places] as they come."""
    return rows.index_select(0, places) if rows.device.type == "cpu" else rows[places]


def _bends_logits(name: str, value: Any) -> bool:
    """True for a setting that says that logits are scaled or capped after the head. A false alarm costs memory only."""
    is_of_head = "logit" in name or "lm_head" in name
    bends = any(word in name for word in ("cap", "scal", "mult", "div"))
    is_of_others = any(word in name for word in ("attn", "attention", "router"))
    return is_of_head and bends and not is_of_others and value is not False and value not in (None, 1)
