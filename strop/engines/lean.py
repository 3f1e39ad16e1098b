"""One token of each slot through a model of Llama's shape, without the calls of its modules, which take most of the time of a
small model's step. The weights are the modules' own, so that an update of them is seen at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu

from strop.engines.decoders import Decoder, SlotDecoder
from strop.engines.shared_prompts import SharedPromptDecoder
from strop.products import LEAST_WORK, Linear, linear

# Other classes may compute something else that a comparison on a few tokens does not show.
_MODELS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_ROTATIONS = {"default", "linear", "llama3"}  # those that depend on the position alone

Compute = Callable[[Tensor], Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


SHORT_PROMPT = 32  # tokens: copies of such prompts cost less than to look at prompts and responses apart


def lean_decoder(model: Any, *, num_slots: int, prompt_width: int, response_width: int) -> Decoder:
    """The decoder for prompts of such a length."""
    kind = LeanSlotDecoder if prompt_width <= SHORT_PROMPT else LeanSharedDecoder
    return kind(model, num_slots=num_slots, prompt_width=prompt_width, response_width=response_width)


class LeanSharedDecoder(SharedPromptDecoder):
    """The model itself reads prompts, and `LeanModel` what is sampled."""

    def __init__(self, model: Any, *, num_slots: int, prompt_width: int, response_width: int) -> None:
        super().__init__(model, num_slots=num_slots, prompt_width=prompt_width, response_width=response_width)
        self._lean = LeanModel(model, num_positions=prompt_width + response_width, num_rows=num_slots)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._lean(tokens, positions, self.attend)


class LeanSlotDecoder(SlotDecoder):
    """The same with a copy of the prompt in each slot. A prompt is read once: samples that start later get a copy of the
    keys and values that another slot holds, in use or not."""

    def __init__(self, model: Any, *, num_slots: int, prompt_width: int, response_width: int) -> None:
        super().__init__(model, num_slots=num_slots, prompt_width=prompt_width, response_width=response_width)
        self._lean = LeanModel(model, num_positions=self.width, num_rows=num_slots)
        self._prompt_width = prompt_width
        self._rows, self._places = (torch.arange(size, device=self._device) for size in (num_slots, self.width))
        self._prompts: list[tuple[int, ...] | None] = [None] * num_slots  # whose copy a slot holds
        self._after: dict[tuple[int, ...], Tensor] = {}  # logits after each of them

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        keys = [tuple(prompt) for prompt in prompts]
        wanted: dict[tuple[int, ...], list[int]] = {}
        for key, group in zip(keys, slots, strict=True):
            wanted.setdefault(key, []).extend(group)
        held = {key: slot for slot, key in enumerate(self._prompts) if key in wanted}
        stores = [store for layer in self._cache.layers for store in (layer.keys, layer.values)] if held else []
        copies = [store[list(held.values()), :, : self._prompt_width] for store in stores]
        new = [key for key in wanted if key not in held]
        if new:
            self._after |= zip(new, super().prefill(new, [wanted[key] for key in new]), strict=True)
        for store, copy in zip(stores, copies, strict=True):
            for key, row in zip(held, copy, strict=True):
                store[wanted[key], :, : self._prompt_width] = row
        for key, group in wanted.items():
            self.lengths[group] = len(key)
            for slot in group:
                self._prompts[slot] = key
        self._after = {key: self._after[key] for key in self._prompts if key is not None}
        return torch.stack([self._after[key] for key in keys])

    def decode(self, tokens: Tensor) -> Tensor:
        count = len(tokens)
        lengths, num_heads = self.lengths[:count], self._cache.layers[0].keys.shape[1]
        self.decode_width = int(lengths.max()) + 1
        self.decode_rows, self.decode_positions = self._rows[:count], lengths.to(self._device, copy=True)
        last = self.decode_positions[:, None].expand(count, num_heads).reshape(-1, 1, 1)
        is_later = self._places[: self.decode_width] > last  # [slots x kv heads, 1, positions]
        self._mask = is_later.to(self._dtype).mul_(torch.finfo(self._dtype).min)
        logits = self._lean(tokens.to(self._device), self.decode_positions, self._attend)
        self.lengths[:count] += 1
        return logits

    def _attend(self, number: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        layer, (count, heads, size) = self._cache.layers[number], queries.shape
        for store, new in ((layer.keys, keys), (layer.values, values)):
            store.transpose(1, 2).index_put_((self.decode_rows, self.decode_positions), new)
        seen = (store[:count, :, : self.decode_width].flatten(0, 1) for store in (layer.keys, layer.values))
        every_key, every_value = seen
        own = queries.reshape(len(every_key), -1, size)
        scores = torch.baddbmm(self._mask, own, every_key.transpose(1, 2), alpha=scaling)
        weights = scores.softmax(-1, dtype=torch.float32).to(queries.dtype)
        return torch.bmm(weights, every_value).view(count, heads * size)

    def move(self, source: int, target: int) -> None:
        """The prompt that was in `target` goes to `source`: it may be asked for again."""
        length, width = int(self.lengths[source]), self._prompt_width
        for layer in self._cache.layers:
            for store in (layer.keys, layer.values):
                prompt = store[target, :, :width].clone()
                store[target, :, :length] = store[source, :, :length]
                store[source, :, :width] = prompt
        self.lengths[target] = length
        self._prompts[source], self._prompts[target] = self._prompts[target], self._prompts[source]

    def forget(self) -> None:
        self._prompts = [None] * self.num_slots
        self._after.clear()


class LeanModel:
    """The forward pass of causal language models whose layers have rotated grouped-query attention and a gated MLP, each
    behind a norm.

    Args:
        model: of transformers. Its products may be those of adapters.
        num_positions: of the longest sequence.
        num_rows: tokens of a pass, at most.

    Raises:
        NotImplementedError: it is of another class, or rotates otherwise.
    """

    def __init__(self, model: Any, *, num_positions: int, num_rows: int) -> None:
        name, config = type(model).__name__, model.config
        of_transformers = type(model).__module__.startswith("transformers.models.")
        if not of_transformers or name not in _MODELS:
            raise NotImplementedError(f"{name} is not known to have the shape")
        if (kind := config.rope_parameters.get("rope_type", "default")) not in _ROTATIONS:
            raise NotImplementedError(f"positions of kind {kind}")
        body = model.model
        self._embed, self._norm, self._head = (
            _embedding(body.embed_tokens),
            _Norm(body.norm),
            _product(model.lm_head, num_rows),
        )
        self._layers = [_Layer(layer, num_rows) for layer in body.layers]
        weight = body.norm.weight
        cos, sin = body.rotary_emb(weight, torch.arange(num_positions, device=weight.device)[None])
        half = cos.shape[-1] // 2
        # [positions, 1, D]; rotated is `x cos + (the halves of x exchanged) sin`, so that sin's first half has a minus
        self._cos, self._sin = cos[0, :, None], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)[:, None]

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [B, V].

        Args:
            tokens: [B].
            positions: [B], of the tokens in their sequences.
            attend: takes a layer's number, queries [B, heads, D], keys and values [B, kv heads, D] and the scaling of the
                scores; it keeps keys and values and returns the attention [B, heads x D].
        """
        x = self._embed(tokens)
        cos, sin = self._cos[positions], self._sin[positions]
        for number, layer in enumerate(self._layers):
            x = layer(number, x, cos, sin, attend)
        return self._head(self._norm(x))


class _Layer:
    """One layer's weights, and how they are used."""

    def __init__(self, layer: Any, num_rows: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._before, self._after = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._q, self._k, self._v, self._o = (_product(getattr(attention, f"{name}_proj"), num_rows) for name in "qkvo")
        self._gate, self._up, self._down = (
            _product(getattr(mlp, f"{name}_proj"), num_rows) for name in ("gate", "up", "down")
        )
        self._head_norms = [
            _Norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        ]
        self._size, self._scaling = attention.head_dim, attention.scaling

    def __call__(self, number: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        normed, size = self._before(x), self._size
        queries = self._q(normed).view(len(x), -1, size)
        keys, values = self._k(normed).view(len(x), -1, size), self._v(normed).view(len(x), -1, size)
        if self._head_norms:
            of_queries, of_keys = self._head_norms
            queries, keys = of_queries(queries), of_keys(keys)
        both = torch.cat([queries, keys], 1)
        both = torch.addcmul(both * cos, both.roll(size // 2, -1), sin)
        queries, keys = both.split([queries.shape[1], keys.shape[1]], 1)
        x = x + self._o(attend(number, queries, keys, values, self._scaling))
        normed = self._after(x)
        return x + self._down(silu(self._gate(normed)).mul_(self._up(normed)))


class _Norm:
    """Root-mean-square normalisation."""

    def __init__(self, module: Any) -> None:
        self._parameters, size = module._parameters, module.weight.shape[-1]
        self._share, self._eps = 1.0 / size, torch.full((), module.variance_epsilon, device=module.weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=self._share).rsqrt_()
        return (x * scale).to(x.dtype) * self._parameters["weight"]


def _product(module: Any, num_rows: int) -> Compute:
    """What a linear module computes of so many rows at most; a module of another class, as adapters are, is called."""
    if type(module) not in (nn.Linear, Linear):
        return module
    multiply = linear if num_rows * module.weight.numel() >= LEAST_WORK else nn.functional.linear
    own = module._parameters  # a module looks in there last
    return lambda x: multiply(x, own["weight"], own["bias"])


def _embedding(module: Any) -> Compute:
    """The same of embeddings."""
    return (lambda tokens: embedding(tokens, module.weight)) if type(module) is nn.Embedding else module
