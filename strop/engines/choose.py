"""Which decoder a model can be sampled with: decided by numbers, on a few made-up tokens, before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strop.engines.decoders import Decoder, RecomputeDecoder, SlotDecoder, has_full_attention, max_positions
from strop.engines.lean import SHORT_PROMPT, lean_decoder
from strop.engines.shared_prompts import SharedPromptDecoder
from strop.types import ModelError, model_failure

# The probe: prompts of unequal length, the first one read for two slots; each slot takes a token; the first slot ends and
# the last one takes its place; those left take another token.
_LENGTHS, _SLOTS, _NEW = (3, 1), ((0, 1), (2,)), 2
_PROMPT_WIDTH = max(_LENGTHS)
_WIDTH = _PROMPT_WIDTH + _NEW
# What products in other shapes may differ by, as a share of the largest logit.
_ROUNDING, _COARSE_ROUNDING = 1e-4, 5e-2


MakeDecoder = Callable[..., Decoder]


@torch.no_grad()
def choose_decoder(model: Any) -> MakeDecoder:
    """The fastest decoder that gives the logits of the model's own forward pass over each sequence alone.

    Raises:
        ModelError: none does.
    """
    name, limit = type(model).__name__, max_positions(model)
    if limit is not None and limit < _WIDTH:
        raise ModelError(f"{name} has {limit} positions: too few to sample from.")
    sequences = _sequences(model.config.get_text_config().vocab_size)
    try:
        wanted = _plain_logits(model, sequences)
    except Exception as error:  # another library's model raises whatever it likes
        raise model_failure(error, model, "single rows of 3 to 5 tokens") from error
    if not wanted.isfinite().all():
        return RecomputeDecoder  # nothing to compare; the engine stops at the first token that it samples
    fault = ""
    cached = (lean_decoder, SharedPromptDecoder, SlotDecoder) if has_full_attention(model) else ()
    for kind in (*cached, RecomputeDecoder):
        try:
            widths = (_PROMPT_WIDTH, SHORT_PROMPT + 1) if kind is lean_decoder else (_PROMPT_WIDTH,)
            difference = max(_difference(_decoded_logits(kind, model, sequences, width), wanted) for width in widths)
        except Exception as error:  # noqa: BLE001 - as above
            fault = f"{type(error).__name__}: {error}"
            continue
        if difference <= (_ROUNDING if wanted.dtype.itemsize >= 4 else _COARSE_ROUNDING):
            return kind
        fault = (
            f"logits of rows of unequal length differ from those of each row alone, by {difference:.1g} of the largest"
        )
    raise ModelError(f"engine.kind = torch cannot sample from {name}: {fault}.")


def _sequences(vocab: int) -> list[list[int]]:
    """Prompt and two more tokens of each slot."""
    return [
        [(7 * place + 3 + length) % vocab for place in range(length)] + [(5 * slot + 1) % vocab, (3 * slot + 2) % vocab]
        for length, group in zip(_LENGTHS, _SLOTS, strict=True)
        for slot in group
    ]


def _plain_logits(model: Any, sequences: list[list[int]]) -> Tensor:
    """Logits [8, V]: after each of the three prompts, after the three next tokens, and after the last ones of slots 2
    and 1."""
    device = next(model.parameters()).device
    rows = [model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0] for row in sequences]
    return torch.stack([*(r[-3] for r in rows), *(r[-2] for r in rows), rows[2][-1], rows[1][-1]])


def _decoded_logits(kind: MakeDecoder, model: Any, sequences: list[list[int]], prompt_width: int) -> Tensor:
    """The same by a decoder."""
    decoder = kind(model, num_slots=len(sequences), prompt_width=prompt_width, response_width=_NEW)
    prompts = decoder.prefill([sequences[group[0]][:-2] for group in _SLOTS], _SLOTS)
    first = decoder.decode(torch.tensor([row[-2] for row in sequences]))
    decoder.move(2, 0)
    second = decoder.decode(torch.tensor([sequences[2][-1], sequences[1][-1]]))
    return torch.cat([prompts[[0, 0, 1]], first, second])


def _difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest logit. In bfloat16 the median over rows: there rounding may send
    a token to another expert, which moves its whole row, while a wrong cache or position is wrong in most of them."""
    rows = (found - wanted).abs().amax(-1).float() / wanted.abs().max().float()
    return float(rows.max() if wanted.dtype.itemsize >= 4 else rows.median())
