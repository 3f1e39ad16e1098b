"""Log-probabilities of a batch's trainable tokens from a Hugging Face causal language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop import ops
from strop.data.batch import Batch
from strop.trainers.layout import Layout, LayoutKind, lay_out
from strop.types import UserError

# Config names under which models scale or cap their logits after the head.
_BENT_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logits_divider")


class TokenScorer:
    """One model as a function from a micro-batch to log-probabilities and entropies of its trainable tokens.

    Where the model is a body and a plain linear head (checked once, on numbers), only hidden states of the wanted
    positions reach the head and all logits are never held; other models go through their own forward pass.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._has_plain_head = self._head_is_plain()

    def __call__(
        self, batch: Batch, *, temperature: float, layout: LayoutKind, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] and entropies [N] of the N trainable tokens of `batch`, in flat order."""
        laid = lay_out(batch, layout)
        predicting = (laid.places[batch.loss_mask] - 1).to(self.device)
        targets = batch.tokens[batch.loss_mask].to(self.device)
        if self._has_plain_head:
            hidden = self._body(laid).flatten(0, 1)[predicting]
            weight = self.model.get_output_embeddings().weight
            return ops.linear_logprobs(hidden, weight, targets, temperature=temperature, with_entropy=with_entropy)
        logits = self.model(**self._inputs(laid)).logits.flatten(0, 1)[predicting]
        entropy = ops.logits_entropy(logits, temperature=temperature) if with_entropy else None
        return ops.token_logprobs(logits, targets, temperature=temperature), entropy

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
        ids = torch.tensor([[0, 1, 2, 1, 0]], device=self.device)
        positions = torch.tensor([[0, 1, 2, 0, 1]], device=self.device)
        alone = self.model(input_ids=ids[:, 3:], use_cache=False).logits[0]
        packed = self.model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits[0, 3:]
        if not self._are_equal(alone, packed):
            raise UserError(
                "trainer.layout must be padded for this model, got packed: its sequences see the ones before them in a packed "
                f"row (logits differ by {(alone - packed).abs().max():.2g})."
            )

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        settings = self.model.config.get_text_config().to_dict()
        if any(settings.get(name) not in (None, 1, 1.0) for name in _BENT_LOGITS):
            return False
        head, body = self.model.get_output_embeddings(), self.model.base_model
        if not isinstance(head, torch.nn.Linear) or head.bias is not None or body is self.model:
            return False
        ids = torch.arange(4, device=self.device)[None] % head.weight.shape[0]
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        if hidden.shape[-1] != head.weight.shape[1]:
            return False
        logits = self.model(input_ids=ids, use_cache=False).logits
        return self._are_equal(hidden @ head.weight.T, logits)

    @staticmethod
    def _are_equal(one: Tensor, other: Tensor) -> bool:
        """Equal up to the rounding of their type."""
        loose = 2e-2 if one.dtype in (torch.bfloat16, torch.float16) else 1e-4
        return bool((one - other).abs().max() <= loose * other.abs().max())
