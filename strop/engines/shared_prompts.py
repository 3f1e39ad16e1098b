"""Decoding where the samples of a prompt share its keys and values: they are stored, and read at every step, once for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from strop.engines.decoders import cache_name, last_logits

FILLED_SHARE = 0.75  # of the prompts that products are made with
_NAME = "strop_shared_prompts"
_KNOWN = {
    "scaling",
    "dropout",
    "position_ids",
    "is_causal",
    "use_cache",
    "cache_position",
}  # what may be said of attention


class SharedPromptDecoder:
    """Decodes with the cache in two parts: prompts x `prompt_width` positions, each prompt once, and slots x `response_width`
    positions. For models whose layers all attend to everything before them and call transformers' attention functions.

    A query of a slot sees the keys of its prompt and of its own response, in one softmax. Products with a prompt's keys are
    made for all its slots together. A prompt that is in the cache is not read again until `forget`.
    """

    def __init__(self, model: Any, *, num_slots: int, prompt_width: int, response_width: int) -> None:
        self.model, self.num_slots = model, num_slots
        self.prompt_width, self.response_width = prompt_width, response_width
        parameter = next(model.parameters())
        self._device = parameter.device
        self._cache = Cache(layers=[_Layer(self) for _ in range(model.config.get_text_config().num_hidden_layers)])
        self._cache_name = cache_name(model)
        self._places: dict[tuple[int, ...], int] = {}  # of prompts in the cache
        self._after: list[Tensor | None] = [None] * num_slots  # logits after each of them
        self._prompt_lengths = torch.zeros(num_slots, dtype=torch.int64)
        self._lengths = torch.zeros(num_slots, dtype=torch.int64)  # of responses
        self._prompt_of = np.zeros(num_slots, dtype=np.int64)
        self.new_prompts: Tensor | None = None  # places of those that are read
        self.step: _Step | None = None
        self._regular: _Regular | None = None

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        first_slot = min(slot for group in slots for slot in group)
        in_use = set(self._prompt_of[:first_slot].tolist())
        keys, new = [tuple(prompt) for prompt in prompts], []
        in_use |= {self._places[key] for key in keys if key in self._places}
        free = (place for place in range(self.num_slots) if place not in in_use)
        for key in keys:
            if key not in self._places:
                self._take_place(key, next(free))
                new.append(key)
        if new:
            self.new_prompts = torch.tensor([self._places[key] for key in new], device=self._device)
            logits = last_logits(self.model, new, self._device, {self._cache_name: self._cache, "use_cache": True})
            self.new_prompts = None
            for key, row in zip(new, logits, strict=True):
                self._after[self._places[key]] = row
        for key, group in zip(keys, slots, strict=True):
            self._prompt_of[list(group)] = self._places[key]
            self._lengths[list(group)] = 0
        self._regular = None
        found = [self._after[self._places[key]] for key in keys]
        return torch.stack([row for row in found if row is not None])

    def _take_place(self, key: tuple[int, ...], place: int) -> None:
        """Of a prompt that nobody uses any more."""
        self._places = {known: at for known, at in self._places.items() if at != place}
        self._places[key] = place
        self._prompt_lengths[place] = len(key)

    def _close_gaps(self, count: int) -> None:
        """The prompts of slots in use come first, because products are made with all up to the last one. A few that nobody uses
        cost less than moving others into their place."""
        in_use = np.unique(self._prompt_of[:count])
        if len(in_use) >= FILLED_SHARE * (in_use[-1] + 1):
            return
        gaps = np.setdiff1d(np.arange(len(in_use)), in_use)
        for gap, place in zip(gaps.tolist(), in_use[::-1].tolist(), strict=False):
            both, swapped = [gap, place], [place, gap]
            for layer in self._cache.layers:
                for store in (layer.prompt_keys, layer.prompt_values):
                    store[both] = store[swapped]
            self._prompt_lengths[both] = self._prompt_lengths[swapped]
            self._after[gap], self._after[place] = self._after[place], self._after[gap]
            self._prompt_of[self._prompt_of == place] = gap
            self._places = {key: {gap: place, place: gap}.get(at, at) for key, at in self._places.items()}

    def decode(self, tokens: Tensor) -> Tensor:
        count = len(tokens)
        if self._regular is None or len(self._regular.prompt_of) != count:
            self._close_gaps(count)
            self._regular = _Regular(torch.from_numpy(self._prompt_of[:count].copy()), self._device)
        prompt_lengths, lengths = self._prompt_lengths[self._regular.prompt_of], self._lengths[:count]
        self.step = _Step(self._regular, prompt_lengths, lengths, self._device)
        logits = self._forward(tokens.to(self._device), (prompt_lengths + lengths).to(self._device))
        self._lengths[:count] += 1
        return logits

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, V] after the tokens [B], which stand at `positions` [B] of their sequences."""
        assert self.step is not None
        with _attending(self):
            output = self.model(
                input_ids=tokens[:, None],
                attention_mask=self.step.mask,  # of four dimensions: it is handed on as it is
                position_ids=positions[:, None],
                use_cache=True,
                **{self._cache_name: self._cache},
            )
        return output.logits[:, -1]

    def attend(self, number: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention [B, heads x D] of one layer's queries [B, heads, D], whose keys and values [B, kv heads, D] are kept."""
        layer = self._cache.layers[number]
        layer.keep(keys, values)
        return layer.attend(queries, scaling).flatten(1)

    def move(self, source: int, target: int) -> None:
        length = int(self._lengths[source])
        for layer in self._cache.layers:
            if layer.is_initialized:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]
        self._lengths[target], self._prompt_of[target] = self._lengths[source], self._prompt_of[source]
        self._regular = None

    def forget(self) -> None:
        """Prompts that come again are read again: the weights may be others."""
        self._places.clear()


class _Regular:
    """Which slots share a prompt, as rows of equal number: slot b is row `at[b]` of prompts x rows, or b where `at` is None."""

    def __init__(self, prompt_of: Tensor, device: torch.device) -> None:
        self.prompt_of, count = prompt_of, len(prompt_of)
        order = prompt_of.argsort(stable=True)
        _, sizes = prompt_of[order].unique_consecutive(return_counts=True)
        firsts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        row_of = torch.empty(count, dtype=torch.int64)
        row_of[order] = torch.arange(count) - firsts
        self.num_prompts, self.num_rows = int(prompt_of.max()) + 1, int(sizes.max())
        at = prompt_of * self.num_rows + row_of  # of a slot among prompts x rows
        self.at = None if at.tolist() == list(range(self.num_prompts * self.num_rows)) else at.to(device)


class _Step:
    """What all layers of a decoding step need to know."""

    def __init__(self, regular: _Regular, prompt_lengths: Tensor, lengths: Tensor, device: torch.device) -> None:
        self.regular = regular
        self.prompt_width, self.response_width = int(prompt_lengths.max()), int(lengths.max()) + 1
        self.positions = lengths.to(device, copy=True)
        self.slots = torch.arange(len(lengths), device=device)
        is_prompt = torch.arange(self.prompt_width)[None] < prompt_lengths[:, None]
        is_response = torch.arange(self.response_width)[None] <= lengths[:, None]
        seen = torch.cat([is_prompt, is_response], dim=1)
        self.mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None, None].to(device)


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: prompts and responses, each x heads x positions x dimension, filled in place."""

    is_sliding = False

    def __init__(self, owner: SharedPromptDecoder) -> None:
        super().__init__()
        self._owner = owner
        self.keys = self.values = self.prompt_keys = self.prompt_values = torch.zeros(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        owner = self._owner
        for name, states in (("keys", key_states), ("values", value_states)):
            _, heads, _, size = states.shape
            setattr(self, name, states.new_zeros(owner.num_slots, heads, owner.response_width, size))
            setattr(self, f"prompt_{name}", states.new_zeros(0, heads, owner.prompt_width, size))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self._owner
        if owner.new_prompts is not None:
            self._make_room(int(owner.new_prompts.max()) + 1)
            length = key_states.shape[2]
            self.prompt_keys[owner.new_prompts, :, :length] = key_states
            self.prompt_values[owner.new_prompts, :, :length] = value_states
            return key_states, value_states
        self.keep(key_states[:, :, 0], value_states[:, :, 0])
        _attention.layer = self
        return key_states, value_states

    def keep(self, keys: Tensor, values: Tensor) -> None:
        """Those [B, kv heads, D] of one token of each slot."""
        step = self._owner.step
        assert step is not None
        self.keys[step.slots, :, step.positions] = keys
        self.values[step.slots, :, step.positions] = values

    def _make_room(self, num_prompts: int) -> None:
        """For so many prompts; groups have fewer of them than slots."""
        have = self.prompt_keys.shape[0]
        if num_prompts <= have:
            return
        more = min(max(num_prompts, 2 * have), self._owner.num_slots) - have
        for name in ("prompt_keys", "prompt_values"):
            store = getattr(self, name)
            setattr(self, name, torch.cat([store, store.new_zeros(more, *store.shape[1:])]))

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Attention [B, heads, D] of one query for each slot."""
        step = self._owner.step
        assert step is not None
        regular, (count, heads, size) = step.regular, query.shape
        kv = self.keys.shape[1]
        own = query.reshape(count, kv, heads // kv, size) * scaling
        prompt_keys = self.prompt_keys[: regular.num_prompts, :, : step.prompt_width]
        prompt_values = self.prompt_values[: regular.num_prompts, :, : step.prompt_width]
        response_keys = self.keys[:count, :, : step.response_width]
        response_values = self.values[:count, :, : step.response_width]
        to_prompt = _ungrouped(_grouped(own, regular) @ prompt_keys.transpose(-1, -2), regular)
        scores = torch.cat([to_prompt, own @ response_keys.transpose(-1, -2)], dim=-1)
        weights = (scores.float() + step.mask).softmax(-1).to(query.dtype)
        of_prompt, of_response = weights.split([step.prompt_width, step.response_width], dim=-1)
        found = _ungrouped(_grouped(of_prompt, regular) @ prompt_values, regular) + of_response @ response_values
        return found.reshape(count, heads, size)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _grouped(rows: Tensor, regular: _Regular) -> Tensor:
    """[B, kv, rep, X] of slots to [prompts, kv, rows x rep, X]; rows that no slot is in are 0."""
    _, kv, rep, width = rows.shape
    found = rows
    if regular.at is not None:
        found = rows.new_zeros(regular.num_prompts * regular.num_rows, kv, rep, width)
        found[regular.at] = rows
    found = found.reshape(regular.num_prompts, regular.num_rows, kv, rep, width).transpose(1, 2)
    return found.reshape(regular.num_prompts, kv, regular.num_rows * rep, width)


def _ungrouped(grouped: Tensor, regular: _Regular) -> Tensor:
    """The way back."""
    prompts, kv, rows, width = grouped.shape
    rep = rows // regular.num_rows
    found = grouped.view(prompts, kv, regular.num_rows, rep, width).transpose(1, 2)
    found = found.reshape(prompts * regular.num_rows, kv, rep, width)
    return found if regular.at is None else found[regular.at]


class _Attention:
    """transformers' attention function while a decoder decodes; `layer` is the one whose cache was written last."""

    layer: _Layer | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        unknown = [name for name, given in more.items() if given is not None and name not in _KNOWN]
        layer, self.layer = self.layer, None
        if layer is None or unknown:
            raise NotImplementedError(f"attention with {', '.join(unknown)}")
        scaling = more.get("scaling")
        found = layer.attend(query.squeeze(2), query.shape[-1] ** -0.5 if scaling is None else scaling)
        return found[:, None], None


_attention = _Attention()
AttentionInterface.register(_NAME, _attention)


@contextmanager
def _attending(decoder: SharedPromptDecoder) -> Iterator[None]:
    """The model calls this file's attention for as long as this lasts."""
    config = decoder.model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _attention.layer = None
