"""How the engine `torch` runs a model over its slots: with a key-value cache, or without where a model's cache is of
another kind. Both give the logits of the next token for each slot and hold the same interface."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Decoder(Protocol):
    """Slots 0 .. n-1 are in use; the caller keeps them contiguous with `move`."""

    def __init__(self, model: Any, *, num_slots: int, prompt_width: int, response_width: int) -> None: ...

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """Read each prompt once, fill all its slots, and return the logits [prompts, V] after the prompt."""
        ...

    def decode(self, tokens: Tensor) -> Tensor:
        """Append one token to each of the slots 0 .. n-1 and return their next logits [n, V]."""
        ...

    def move(self, source: int, target: int) -> None:
        """Put what slot `source` holds into slot `target`."""
        ...

    def forget(self) -> None:
        """The weights may be others from now on: nothing is kept of prompts that are read later."""
        ...


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: slots x heads x positions x dimension, filled in place."""

    is_sliding = False

    def __init__(self, cache: SlotDecoder) -> None:
        super().__init__()
        self._owner = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, width = self._owner.num_slots, self._owner.width
        self.keys = key_states.new_zeros(slots, key_states.shape[1], width, key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], width, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self._owner
        if owner.prefill_slots is not None:
            length = key_states.shape[2]
            self.keys[owner.prefill_slots, :, :length] = key_states[owner.prefill_rows]
            self.values[owner.prefill_slots, :, :length] = value_states[owner.prefill_rows]
            return key_states, value_states
        rows, at = owner.decode_rows, owner.decode_positions
        self.keys[rows, :, at] = key_states[:, :, 0]
        self.values[rows, :, at] = value_states[:, :, 0]
        return self.keys[: len(rows), :, : owner.decode_width], self.values[: len(rows), :, : owner.decode_width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotDecoder:
    """Decodes with a key-value cache of `num_slots` x `width` positions. For models whose layers all attend to
    everything before them."""

    def __init__(self, model: Any, *, num_slots: int, prompt_width: int, response_width: int) -> None:
        self.model, self.num_slots, self.width = model, num_slots, prompt_width + response_width
        self.lengths = torch.zeros(num_slots, dtype=torch.int64)
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        num_layers = model.config.get_text_config().num_hidden_layers
        self._cache = Cache(layers=[_SlotLayer(self) for _ in range(num_layers)])
        self._cache_name = cache_name(model)
        self.prefill_slots: Tensor | None = None
        self.prefill_rows: Tensor | None = None
        self.decode_rows = self.decode_positions = torch.zeros(0, dtype=torch.int64)
        self.decode_width = 0

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        lengths = torch.tensor([len(p) for p in prompts])
        counts = torch.tensor([len(s) for s in slots])
        flat = torch.tensor([slot for group in slots for slot in group])
        self.prefill_slots = flat.to(self._device)
        self.prefill_rows = torch.arange(len(prompts)).repeat_interleave(counts).to(self._device)
        self.lengths[flat] = lengths.repeat_interleave(counts)
        logits = last_logits(self.model, prompts, self._device, {self._cache_name: self._cache, "use_cache": True})
        self.prefill_slots = self.prefill_rows = None
        return logits

    def decode(self, tokens: Tensor) -> Tensor:
        count = len(tokens)
        positions = self.lengths[:count].clone()
        self.decode_width = int(positions.max()) + 1
        seen = torch.arange(self.decode_width)[None] <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=self._dtype).masked_fill(~seen, torch.finfo(self._dtype).min)
        self.decode_rows = torch.arange(count, device=self._device)
        self.decode_positions = positions.to(self._device)
        output = self.model(
            input_ids=tokens[:, None].to(self._device),
            attention_mask=mask[:, None, None].to(self._device),
            position_ids=self.decode_positions[:, None],
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        self.lengths[:count] += 1
        return output.logits[:, -1]

    def move(self, source: int, target: int) -> None:
        length = int(self.lengths[source])
        for layer in self._cache.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]
        self.lengths[target] = self.lengths[source]

    def forget(self) -> None:
        """Each prompt is read when its slots are filled."""


class RecomputeDecoder:
    """Reads each sequence again for every token: slow, and right for any causal language model."""

    def __init__(self, model: Any, *, num_slots: int, prompt_width: int, response_width: int) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._sequences: list[list[int]] = [[] for _ in range(num_slots)]

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        for prompt, group in zip(prompts, slots, strict=True):
            for slot in group:
                self._sequences[slot] = list(prompt)
        return last_logits(self.model, prompts, self._device, {"use_cache": False})

    def decode(self, tokens: Tensor) -> Tensor:
        rows = self._sequences[: len(tokens)]
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        return last_logits(self.model, rows, self._device, {"use_cache": False})

    def move(self, source: int, target: int) -> None:
        self._sequences[target] = self._sequences[source]

    def forget(self) -> None:
        """All is read again at every step."""


def cache_name(model: Any) -> str:
    """Of the argument by which a model's forward pass takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def last_logits(model: Any, rows: Sequence[Sequence[int]], device: torch.device, extra: dict[str, Any]) -> Tensor:
    """Logits [rows, V] after the last token of each row; rows are padded on the right, where no real token sees it."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    wanted, column = (lengths - 1).unique(return_inverse=True)
    output = model(
        input_ids=ids.to(device),
        position_ids=torch.arange(ids.shape[1], device=device)[None].expand(ids.shape),
        logits_to_keep=wanted.to(device),
        **extra,
    )
    if output.logits.shape[1] != len(wanted):  # the model does not know logits_to_keep, and gave all
        column = lengths - 1
    return output.logits[torch.arange(len(rows), device=device), column.to(device)]


# What configs call the longest sequence; most of those that do not use the first name map it to theirs.
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


def max_positions(model: Any) -> int | None:
    """The longest sequence that the model has positions for, as its config says; None where it names no limit."""
    config = model.config.get_text_config()
    if getattr(config, "alibi", False) or hasattr(model.base_model, "build_alibi_tensor"):
        return (
            None  # biases by distance, made as long as they are needed; the config's number is what it was trained at
        )
    named = (getattr(config, name, None) for name in _LIMITS)
    return next((limit for limit in named if limit is not None), None)


def has_full_attention(model: Any) -> bool:
    """True if every layer attends to everything before it, so that a plain key-value cache is right."""
    config = model.config.get_text_config()
    settings = config.to_dict()
    kinds = settings.get("layer_types")
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    windows = [value for name, value in settings.items() if name.endswith(("window", "window_size"))]
    return not any(windows) and model._supports_sdpa
