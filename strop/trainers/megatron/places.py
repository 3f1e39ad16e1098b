"""Where each weight of a Hugging Face model is in Megatron-Core's parameters of this rank, bit for bit, both ways.

Hugging Face                              Megatron-Core, in one rank of so many that divide layers (t)
q_proj, k_proj, v_proj                    linear_qkv: of each of its groups the queries' heads, the keys', the values'
gate_proj, up_proj                        linear_fc1: its rows of the one, then its rows of the other
o_proj, down_proj                         linear_proj, linear_fc2: its columns
embed_tokens, lm_head                     word_embeddings, output_layer: its rows, zeros after the last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.trainers.megatron.groups import Groups
from strop.trainers.megatron.shape import Shape

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """A part of a whole weight, in a parameter of this rank.

    Attributes:
        parameter: that it is in, perhaps beside others.
        view: of a tensor as large as the parameter, what belongs to the weight.
        dim, start, length: which part of the whole weight that is.
        is_copy: another rank has the same part, which is the one that counts.
    """

    parameter: nn.Parameter
    view: View
    dim: int
    start: int
    length: int
    is_copy: bool

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Set this rank's part of a whole weight."""
        part = whole.narrow(self.dim, self.start, self.length)
        part.copy_(self.view(local).reshape(part.shape))

    def take(self, whole: Tensor, local: Tensor) -> None:
        """Set what is in this rank to its part of a whole weight."""
        mine = self.view(local)
        mine.copy_(whole.narrow(self.dim, self.start, self.length).reshape(mine.shape))


def find_places(network: nn.Module, shape: Shape, groups: Groups) -> dict[str, Place]:
    """Of a network of Megatron-Core's, by Hugging Face's names: what of it is in this rank."""
    return dict(_places(dict(network.named_parameters()), shape, groups))


def _places(named: dict[str, nn.Parameter], shape: Shape, groups: Groups) -> Iterator[tuple[str, Place]]:
    rank, size = groups.layer_rank, groups.tensor_parallel
    rows = shape.padded_vocab_size(size) // size
    first = min(rank * rows, shape.vocab_size)
    number = min(shape.vocab_size, first + rows) - first

    def whole(name: str) -> Place:
        parameter = named[name]
        return Place(parameter, _all, 0, 0, len(parameter), is_copy=rank > 0)

    def divided(name: str, view: View = _all, dim: int = 0) -> Place:
        parameter = named[name]
        seen = view(parameter.detach())
        length = seen.numel() // parameter.shape[1 - dim] if parameter.dim() == 2 else seen.numel()
        return Place(parameter, view, dim, rank * length, length, is_copy=False)

    def vocabulary(name: str, *, is_copy: bool) -> Place:
        return Place(named[name], lambda tensor: tensor[:number], 0, first, number, is_copy=is_copy)

    if groups.is_first_stage:
        yield "model.embed_tokens.weight", vocabulary("embedding.word_embeddings.weight", is_copy=False)
    num_here = shape.num_layers // groups.pipeline_parallel
    grouped = _Grouped(shape.num_groups // size, shape.num_heads // shape.num_groups, shape.head_size)
    for layer in range(num_here):
        theirs = f"model.layers.{groups.stage * num_here + layer}."
        ours = f"decoder.layers.{layer}."
        for kind in ("weight", "bias") if shape.has_qkv_bias else ("weight",):
            for part, view in grouped.views.items():
                yield f"{theirs}self_attn.{part}_proj.{kind}", divided(f"{ours}self_attention.linear_qkv.{kind}", view)
        yield f"{theirs}self_attn.o_proj.weight", divided(f"{ours}self_attention.linear_proj.weight", dim=1)
        for part in ("q", "k") if shape.norms_queries else ():
            yield f"{theirs}self_attn.{part}_norm.weight", whole(f"{ours}self_attention.{part}_layernorm.weight")
        for part, view in (("gate", _first_half), ("up", _second_half)):
            yield f"{theirs}mlp.{part}_proj.weight", divided(f"{ours}mlp.linear_fc1.weight", view)
        yield f"{theirs}mlp.down_proj.weight", divided(f"{ours}mlp.linear_fc2.weight", dim=1)
        yield f"{theirs}input_layernorm.weight", whole(f"{ours}input_layernorm.weight")
        yield f"{theirs}post_attention_layernorm.weight", whole(f"{ours}pre_mlp_layernorm.weight")
    if groups.is_last_stage:
        yield "model.norm.weight", whole("decoder.final_layernorm.weight")
        if not shape.is_tied:
            yield "lm_head.weight", vocabulary("output_layer.weight", is_copy=False)
        elif not groups.is_first_stage:  # a copy of the embedding, whose gradients the two stages add up
            yield "model.embed_tokens.weight", vocabulary("output_layer.weight", is_copy=True)


class _Grouped:
    """Queries, keys and values in the rows of one matrix: of each group its heads of queries, then of keys, then of values."""

    def __init__(self, num_groups: int, heads_a_group: int, head_size: int) -> None:
        self._shape, self._heads = (num_groups, heads_a_group + 2, head_size), heads_a_group

    @property
    def views(self) -> dict[str, View]:
        heads = self._heads
        return {
            "q": lambda tensor: self._split(tensor)[:, :heads],
            "k": lambda tensor: self._split(tensor)[:, heads],
            "v": lambda tensor: self._split(tensor)[:, heads + 1],
        }

    def _split(self, tensor: Tensor) -> Tensor:
        return tensor.view(*self._shape, *tensor.shape[1:])


def _all(tensor: Tensor) -> Tensor:
    return tensor


def _first_half(tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // 2]


def _second_half(tensor: Tensor) -> Tensor:
    return tensor[len(tensor) // 2 :]


class Exchange:
    """Whole weights of rank 0, and their parts in all ranks.

    Args:
        places: of this rank, by Hugging Face's names.
        shapes: of the whole weights; their order is that of every exchange.
        groups: the ranks.
        device: that parts lie on.
    """

    def __init__(
        self, places: dict[str, Place], shapes: dict[str, torch.Size], groups: Groups, device: torch.device
    ) -> None:
        self._places, self.shapes, self._groups, self._device = places, shapes, groups, device

    @torch.no_grad()
    def gathered(self, name: str, local: Callable[[nn.Parameter], Tensor | None]) -> Tensor | None:
        """A whole weight, or what has its shape, in float32; rank 0 alone gets it. Every number comes from one rank.

        Args:
            local: of a parameter what this rank has, as large as the parameter, 0 where that is not all; None: nothing.
        """
        whole = torch.zeros(self.shapes[name], dtype=torch.float32, device=self._device)
        place = self._places.get(name)
        mine = local(place.parameter) if place is not None and not place.is_copy else None
        if place is not None and mine is not None:
            place.put(whole, mine)
        self._groups.reduce_bits(whole)
        return whole if self._groups.is_first else None

    @torch.no_grad()
    def scattered(self, values: Callable[[str], Any]) -> dict[nn.Parameter, Tensor]:
        """This rank's parts of whole float32 weights that rank 0 has, each as large as its parameter."""
        found = {
            place.parameter: torch.zeros(place.parameter.shape, dtype=torch.float32, device=self._device)
            for place in self._places.values()
        }
        for name, shape in self.shapes.items():
            whole = torch.empty(shape, dtype=torch.float32, device=self._device)
            if self._groups.is_first:
                whole.copy_(values(name))
            self._groups.send(whole)
            place = self._places.get(name)
            if place is not None:
                place.take(whole, found[place.parameter])
        return found

    @torch.no_grad()
    def fill(self, values: Callable[[str], Any]) -> None:
        """Set the parameters of all ranks to weights that rank 0 has."""
        for parameter, part in self.scattered(values).items():
            parameter.copy_(part)
