"""What the engine `torch` knows of the samples in flight: one row of plain arrays per slot, so that a step costs the same few
operations however many samples there are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from strop.engines.sampling import sample, uniforms
from strop.types import Completion, FinishReason, GuardError, Sampling

_NO_ID = -1  # fills rows of stop ids that are shorter than the longest


class Slots:
    """Slots 0 .. n-1 are in use; the caller keeps them contiguous with `move`.

    Args:
        count: how many slots there are.
        device: of the logits.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._seeds = np.zeros(count, dtype=np.uint64)
        self._lengths = np.zeros(count, dtype=np.int64)  # tokens sampled so far
        self._limits = np.zeros(count, dtype=np.int64)
        self._stop_ids = np.full((count, 1), _NO_ID, dtype=np.int64)
        self._tokens = np.zeros((count, 1), dtype=np.int64)
        self._logprobs = np.zeros((count, 1), dtype=np.float32)
        self._versions = np.zeros((count, 1), dtype=np.int64)
        self._temperature = torch.ones(count, device=device)
        self._top_p = torch.ones(count, device=device)
        self._top_k = torch.zeros(count, dtype=torch.int64, device=device)
        self._is_cut = np.zeros(count, dtype=bool)  # by top_p or top_k
        self._is_plain = np.ones(count, dtype=bool)  # temperature 1

    def start(self, slot: int, seed: int, sampling: Sampling, stop_ids: Iterable[int]) -> None:
        """A new sample takes a slot."""
        self._seeds[slot], self._lengths[slot], self._limits[slot] = seed, 0, sampling.max_response_tokens
        ids = sorted(stop_ids)
        self._stop_ids = _widened(self._stop_ids, len(ids), _NO_ID)
        self._stop_ids[slot] = _NO_ID
        self._stop_ids[slot, : len(ids)] = ids
        self._temperature[slot], self._top_p[slot], self._top_k[slot] = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        self._is_cut[slot] = sampling.top_p < 1 or sampling.top_k > 0
        self._is_plain[slot] = sampling.temperature == 1

    def take(self, part: slice, logits: Tensor, version: int) -> Tensor:
        """Sample the next token of the slots of `part` from their logits, one pass over them, and write it down.

        Returns:
            The tokens, on the device of the logits.

        Raises:
            GuardError: a log-probability is not finite.
        """
        tokens, logprobs = sample(
            logits,
            uniforms(self._seeds[part], self._lengths[part]).to(self._device),
            temperature=None if self._is_plain[part].all() else self._temperature[part],
            tail=(self._top_p[part], self._top_k[part]) if self._is_cut[part].any() else None,
        )
        found = logprobs.cpu().numpy()
        if not np.isfinite(found).all():
            raise GuardError(
                "the engine's logits are not finite: the model is broken, or its last update broke it.",
                guard="non_finite",
            )
        rows, at = np.arange(part.start, part.stop), self._lengths[part]
        if at.max(initial=0) >= self._tokens.shape[1]:  # twice as wide: responses seldom are as long as they may be
            width = 2 * self._tokens.shape[1]
            for name in ("_tokens", "_logprobs", "_versions"):
                setattr(self, name, _widened(getattr(self, name), width, 0))
        self._tokens[rows, at] = tokens.cpu().numpy()
        self._logprobs[rows, at] = found
        self._versions[rows, at] = version
        self._lengths[part] += 1
        return tokens

    def last_tokens(self, count: int) -> Tensor:
        """The newest token of each of the first `count` slots."""
        return torch.from_numpy(self._tokens[np.arange(count), self._lengths[:count] - 1])

    def finished(self, count: int) -> list[int]:
        """Those of the first `count` slots whose sample has ended, the last one first."""
        newest = self._tokens[np.arange(count), self._lengths[:count] - 1]
        has_stopped = (self._stop_ids[:count] == newest[:, None]).any(1)
        return np.flatnonzero(has_stopped | (self._lengths[:count] >= self._limits[:count]))[::-1].tolist()

    def completion(self, slot: int) -> Completion:
        """What a slot has sampled. An end id exactly at the limit is "stop"."""
        length = int(self._lengths[slot])
        tokens = tuple(self._tokens[slot, :length].tolist())
        reason: FinishReason = "stop" if tokens[-1] in self._stop_ids[slot].tolist() else "length"
        logprobs, versions = self._logprobs[slot, :length].tolist(), self._versions[slot, :length].tolist()
        return Completion(tokens, tuple(logprobs), tuple(versions), reason)

    def move(self, source: int, target: int) -> None:
        """What slot `source` holds goes into slot `target`."""
        for values in vars(self).values():
            if isinstance(values, np.ndarray | Tensor):
                values[target] = values[source]


def _widened(rows: np.ndarray, width: int, fill: int) -> np.ndarray:
    missing = width - rows.shape[1]
    if missing <= 0:
        return rows
    return np.concatenate([rows, np.full((len(rows), missing), fill, dtype=rows.dtype)], axis=1)
