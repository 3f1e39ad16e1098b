"""From a row of logits to a token and its log-probability, with one uniform number per row from a counter-based stream."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> Tensor:
    """Number in [0, 1) of each (seed, position): the same whatever else is in the batch. float32, shape of the arguments."""
    x = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # arrays wrap around in silence
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    # 22 bits: u x total stays below total in float32, so that the search below never runs past the last token.
    return torch.from_numpy((x >> np.uint64(42)).astype(np.float32) / np.float32(1 << 22))


def sample(
    logits: Tensor, uniform: Tensor, *, temperature: Tensor | None = None, tail: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token per row by inverting the cumulative distribution.

    log-probabilities are those of the distribution that was sampled from: at the temperature, and renormalised over the
    kept set where top_p or top_k cut it. A row of temperature 0 takes the likeliest token, its log-probability at
    temperature 1.

    Args:
        logits: N x V.
        uniform: N, in [0, 1).
        temperature: N; None means 1 in every row.
        tail: top_p and top_k, N each, of which 1 and 0 keep everything; None means that every row does.

    Returns:
        tokens N int64 and logprobs N float32.
    """
    scaled = logits.float()
    greedy = None if temperature is None else temperature == 0
    if temperature is not None and greedy is not None:
        scaled = scaled / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    if tail is not None:
        scaled = _cut_tail(scaled, *tail)
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _cut_tail(scaled: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """-inf outside the top_k likeliest tokens and outside the smallest set whose probability reaches top_p."""
    ordered, order = scaled.sort(-1, descending=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)[None]
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, scaled.shape[-1]))[:, None]
    keep = (rank < limit) & ((before < top_p[:, None]) | (rank == 0) | (top_p[:, None] >= 1))
    return torch.full_like(scaled, -torch.inf).scatter(-1, order, torch.where(keep, ordered, -torch.inf))
