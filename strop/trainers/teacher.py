"""A frozen model that scores sequences which others sampled."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from strop.data.batch import Batch
from strop.trainers.forward import TokenScorer
from strop.trainers.layout_choice import Cutter, readable
from strop.trainers.ranks import Ranks

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenModel:
    """Log-probabilities of a model that never learns.

    Args:
        model: a Hugging Face causal language model, on its device.
        max_tokens_per_micro_batch: token positions of one forward pass.
    """

    def __init__(self, model: Any, *, max_tokens_per_micro_batch: int) -> None:
        self._scorer = TokenScorer(model.eval().requires_grad_(False))
        self._cut = Cutter(self._scorer.model, readable(self._scorer, "auto", Ranks()), max_tokens_per_micro_batch)

    def logprobs(self, batch: Batch, *, temperature: float) -> Tensor:
        """Log-probabilities [T] of the batch's trainable tokens, 0 elsewhere; no gradient."""
        return self._scorer.all_logprobs(batch, self._cut(batch), temperature=temperature)

    def fingerprint(self) -> str:
        """Of names, shapes, types and values of all weights: another one for another model, whatever folder it is in."""
        return fingerprint(self._scorer.model.state_dict())


def fingerprint(weights: dict[str, Tensor]) -> str:
    """Of names, shapes, types and values of weights."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        bits = weight.detach().contiguous().flatten().view(_BITS[weight.element_size()])
        digest.update(repr((name, tuple(weight.shape), str(weight.dtype), _checksum(bits))).encode())
    return digest.hexdigest()


def _checksum(bits: Tensor) -> int:
    """Sum of value x place in 64 bits that wrap around: exact on every device, and another one for another order."""
    total, start = 0, 1
    for part in bits.split(1 << 22):
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        total = (total + int((part * places).sum())) % 2**64
        start += part.numel()
    return total
