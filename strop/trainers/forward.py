"""Log-probabilities of a batch's trainable tokens from a Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from strop import ops
from strop.data.batch import Batch
from strop.trainers.layout import Layout, LayoutKind, cut, lay_out
from strop.types import ModelError, UserError, model_failure

# Head inputs of the probe are multiplied by this (a power of two: exact): logits of every model then reach where a soft
# cap, of 30 say, bends them.
_LOUD = 1024.0


class TokenScorer:
    """One model as a function from a micro-batch to log-probabilities and entropies of its trainable tokens.

    Where the model is a body and a plain linear head (checked once, on numbers), only hidden states of the wanted
    positions reach the head and all logits are never held; other models go through their own forward pass.

    Raises:
        ModelError: the model cannot run, or a token sees later ones.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        try:
            self._has_plain_head = self._head_is_plain()
            is_causal = self._is_causal()
        except Exception as error:  # another library's model raises whatever it likes
            raise model_failure(error, model, "a row of 4 tokens") from error
        if not is_causal:
            raise ModelError(
                f"{type(model).__name__} is no causal language model as it is configured: its logits depend on tokens that "
                "come later."
            )

    def __call__(
        self, batch: Batch, *, temperature: float, layout: LayoutKind, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] and entropies [N] of the N trainable tokens of `batch`, in flat order."""
        with self.explaining(batch, layout):
            laid = lay_out(batch, layout)
            predicting = (laid.places[batch.loss_mask] - 1).to(self.device)
            targets = batch.tokens[batch.loss_mask].to(self.device)
            if self._has_plain_head:
                weight = self.model.get_output_embeddings().weight
                hidden = self._body(laid).flatten(0, 1)[predicting].to(weight.dtype)  # some bodies end in float32
                return ops.linear_logprobs(hidden, weight, targets, temperature=temperature, with_entropy=with_entropy)
            logits = self.model(**self._inputs(laid)).logits.flatten(0, 1)[predicting]
            entropy = ops.logits_entropy(logits, temperature=temperature) if with_entropy else None
            return ops.token_logprobs(logits, targets, temperature=temperature), entropy

    @torch.no_grad()
    def all_logprobs(self, batch: Batch, *, temperature: float, max_tokens: int, layout: LayoutKind) -> Tensor:
        """Log-probabilities [T] of the batch's trainable tokens, 0 elsewhere, in micro-batches of at most `max_tokens`
        positions; no gradient."""
        found = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        for sequences in cut(batch.lengths, max_tokens=max_tokens, kind=layout):
            part = batch.select(sequences)
            if not part.loss_mask.any():
                continue
            numbers, _ = self(part, temperature=temperature, layout=layout, with_entropy=False)
            found[batch.positions(sequences)[part.loss_mask]] = numbers.float().cpu()
        return found

    @contextmanager
    def explaining(self, batch: Batch, layout: LayoutKind) -> Iterator[None]:
        """Forward or backward of a micro-batch: what the model raises becomes a ModelError that says at which input."""
        try:
            yield
        except Exception as error:
            lengths, kind = batch.lengths, layout.replace("_", " ")
            rows = f"{len(lengths)} {kind} sequences of up to {max(lengths)} tokens ({sum(lengths)} together)"
            option = "trainer.max_tokens_per_micro_batch"
            if len(lengths) == 1:  # a smaller micro-batch there is not
                rows, option = (
                    f"a sequence of {lengths[0]} tokens (alone in its micro-batch)",
                    "the length of sequences",
                )
            raise model_failure(error, self.model, rows, option=option) from error

    def _inputs(self, laid: Layout) -> dict[str, Any]:
        return {
            "input_ids": laid.input_ids.to(self.device),
            "attention_mask": None if laid.attention_mask is None else laid.attention_mask.to(self.device),
            "position_ids": laid.position_ids.to(self.device),
            "use_cache": False,
        }

    def _body(self, laid: Layout) -> Tensor:
        return self.model.base_model(**self._inputs(laid)).last_hidden_state

    @torch.no_grad()
    def check_packing(self) -> None:
        """See on numbers that a packed sequence does not see the one before it.

        Raises:
            UserError: it does: the model has no word for where a sequence begins.
        """
        try:
            fault = self._packing_fault()
        except Exception as error:  # noqa: BLE001 - another library's model raises whatever it likes
            fault = f"{type(error).__name__}: {error}"
        if fault:
            raise UserError(f"trainer.layout must be padded for {type(self.model).__name__}, got packed: {fault}.")

    def _packing_fault(self) -> str:
        """What goes wrong where [0 1 2][1 0] are one row; "" if nothing."""
        first, other = [0, 1, 2], [1, 0, 0]
        alone = self._logits([1, 0])
        packed, neighbour = (self._logits([*before, 1, 0], [0, 1, 2, 0, 1])[3:] for before in (first, other))
        if not self._are_equal(alone, packed, rounding=1e-4):  # products in other shapes
            return (
                f"sequences of a packed row are not read as they are alone (logits differ by {_gap(alone, packed):.2g})"
            )
        # Compared with what the tokens before do where they are to be seen: rounding in bfloat16 hides small leaks.
        seen = _gap(*(self._logits([*before, 1, 0], [0, 1, 2, 3, 4])[3:] for before in (first, other)))
        leak = _gap(packed, neighbour)
        return (
            f"sequences see the ones before them in a packed row (logits differ by {leak:.2g})"
            if leak > seen / 10
            else ""
        )

    def _logits(self, ids: list[int], positions: list[int] | None = None) -> Tensor:
        """Logits of one row; without positions as the model places tokens itself."""
        place = {} if positions is None else {"position_ids": torch.tensor([positions], device=self.device)}
        row = torch.tensor([ids], device=self.device)
        return self.model(input_ids=row, attention_mask=None, use_cache=False, **place).logits[0]

    @torch.no_grad()
    def _is_causal(self) -> bool:
        """True if another last token leaves the logits before it; rows rely on that, padded on the right without a mask."""
        vocab = self.model.config.get_text_config().vocab_size
        one, other = (self._logits([token % vocab for token in ids]) for ids in ([3, 1, 2, 0], [3, 1, 2, 1]))
        leak, seen = _gap(one[:-1], other[:-1]), _gap(one[-1], other[-1])
        return not leak > seen / 10  # rounding is far below; numbers that are not finite are for the guards

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """True if logits are the body's last hidden state times the head's weight, and nothing else."""
        vocab = self.model.config.get_text_config().vocab_size
        inputs = {
            "input_ids": torch.arange(4, device=self.device)[None] % vocab,
            "attention_mask": None,
            "position_ids": torch.arange(4, device=self.device)[None],
            "use_cache": False,
        }
        logits = self.model(**inputs).logits  # also where the answer is known: a model that cannot run shows it here
        head, body = self.model.get_output_embeddings(), self.model.base_model
        if not isinstance(head, torch.nn.Linear) or head.bias is not None or body is self.model:
            return False
        if any(_bends_logits(name, value) for name, value in self.model.config.get_text_config().to_dict().items()):
            return False
        hidden = body(**inputs).last_hidden_state.to(head.weight.dtype)
        if hidden.shape[-1] != head.weight.shape[1]:
            return False
        handle = head.register_forward_pre_hook(lambda _, given: (given[0] * _LOUD,))
        try:
            loud = self.model(**inputs).logits
        finally:
            handle.remove()
        plain = hidden @ head.weight.T
        return self._are_equal(plain, logits) and self._are_equal(hidden * _LOUD @ head.weight.T, loud)

    @staticmethod
    def _are_equal(one: Tensor, other: Tensor, *, rounding: float = 1e-5) -> bool:
        """Equal up to rounding, as a share of the largest number; that of a narrow type is wider."""
        if one.dtype in (torch.bfloat16, torch.float16):
            rounding = 2e-2
        return _gap(one, other) <= rounding * float(other.abs().max())


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _bends_logits(name: str, value: Any) -> bool:
    """True for a setting that says that logits are scaled or capped after the head. A false alarm costs memory only."""
    is_of_head = "logit" in name or "lm_head" in name
    bends = any(word in name for word in ("cap", "scal", "mult", "div"))
    is_of_others = any(word in name for word in ("attn", "attention", "router"))
    return is_of_head and bends and not is_of_others and value is not False and value not in (None, 1)
