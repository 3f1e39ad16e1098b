"""Rows of tokens that are divided over ranks (context parallelism), each rank with all tokens of some heads during attention
(Ulysses)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from strop.trainers.attention import attends_to_all
from strop.types import UserError

_ATTENTION = "strop_context_parallel"  # as transformers looks it up


class ContextSplit:
    """A model whose rows are divided over the ranks of a group: of L positions each computes L / n, in order, and all hidden
    states are gathered behind the last layer. Rows are read without a mask: padding has to stand on the right.

    Args:
        model: a skeleton of a Hugging Face model, or what has its `config` and `base_model`.
        group: the ranks.
        tensor_parallel: ranks that divide layers, and so heads, before.

    Raises:
        UserError: a layer does not attend to everything before it, or the ranks do not divide the heads.
    """

    def __init__(self, model: Any, group: ProcessGroup, *, tensor_parallel: int) -> None:
        check_shares_heads(model, group.size(), tensor_parallel=tensor_parallel)
        self._group, self._length, self._name = group, 0, type(model).__name__
        AttentionInterface.register(_ATTENTION, partial(_attention, group))
        model.config._attn_implementation = _ATTENTION
        body = model.base_model
        body.register_forward_pre_hook(self._divide, with_kwargs=True)
        body.register_forward_hook(self._gather)

    def refusal(self, reason: str) -> UserError:
        return UserError(f"trainer.context_parallel must be 1 for {self._name}, got {self._group.size()}: {reason}.")

    def _divide(
        self, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's positions of what a body is called with; rows get padding to a multiple of the ranks."""
        ids, positions = given["input_ids"], given.get("position_ids")
        self._length = ids.shape[1]
        if positions is None:
            positions = torch.arange(self._length, device=ids.device)[None]

        def mine(tensor: Tensor) -> Tensor:
            padded = nn.functional.pad(tensor, (0, -self._length % self._group.size()))
            return padded.chunk(self._group.size(), dim=1)[self._group.rank()]

        return args, {**given, "input_ids": mine(ids), "position_ids": mine(positions), "attention_mask": None}

    def _gather(self, _: nn.Module, args: tuple[Any, ...], found: Any) -> Any:
        hidden: Any = _Gathered.apply(found.last_hidden_state, self._group)
        found.last_hidden_state = hidden[:, : self._length]
        return found

    def part(self, number: int) -> slice:
        """Of so many tokens, those whose numbers this rank computes behind the last layer."""
        rank, size = self._group.rank(), self._group.size()
        return slice(rank * number // size, (rank + 1) * number // size)

    def joined(self, mine: Tensor, number: int) -> Tensor:
        """The numbers [number] of all ranks, of which this one has its `part`. Every rank must make the same loss of them."""
        found: Any = _Joined.apply(mine, self.part(number), number, self._group)
        return found


def check_shares_heads(model: Any, size: int, *, tensor_parallel: int = 1) -> None:
    """Can so many ranks divide rows of this model? Raises UserError as ContextSplit does."""
    name, settings = type(model).__name__, model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(settings, key, None)
        if number is not None and number % (size * tensor_parallel):
            beside = f" with trainer.tensor_parallel = {tensor_parallel}" if tensor_parallel > 1 else ""
            raise UserError(f"trainer.context_parallel must divide {key} of {name}, {number},{beside} got {size}.")
    if not attends_to_all(model):
        raise UserError(
            f"trainer.context_parallel must be 1 for {name}, got {size}: its layers do not all attend to everything before "
            "them."
        )


def _attention(
    group: ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention of rows that are divided: [B, heads, L / n, d] of all heads become [B, heads / n, L, d], and back."""
    whole = [_Exchanged.apply(tensor, 1, 2, group) for tensor in (query, key, value)]
    more.pop("is_causal", None)
    found, _ = sdpa_attention_forward(module, *whole, None, is_causal=True, **more)  # B x L x heads / n x d
    back: Any = _Exchanged.apply(found, 1, 2, group)
    return back, None


class _Exchanged(torch.autograd.Function):
    """A tensor that is whole along one dimension and divided along another one, the other way round."""

    @staticmethod
    def forward(ctx, tensor, whole, divided, group):
        ctx.dims, ctx.group = (divided, whole), group
        return _exchange(tensor, whole, divided, group)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return _exchange(grad_outputs[0], *ctx.dims, ctx.group), None, None, None


def _exchange(tensor: Tensor, whole: int, divided: int, group: ProcessGroup) -> Tensor:
    return torch.cat(_swapped(tensor, whole, group).unbind(0), dim=divided)


def _swapped(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Of each rank the part of its tensor that has this rank's place along a dimension."""
    mine = torch.stack(tensor.chunk(group.size(), dim=dim))
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    return theirs


class _Gathered(torch.autograd.Function):
    """Positions [B, L / n, ...] of all ranks, [B, L, ...]; a gradient is the sum of those that ranks have for it."""

    @staticmethod
    def forward(ctx, mine, group):
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return _swapped(grad_outputs[0], 1, ctx.group).sum(0), None


class _Joined(torch.autograd.Function):
    """Numbers of all ranks side by side; the gradient of a rank's own is that of its own loss, which all ranks have alike."""

    @staticmethod
    def forward(ctx, mine, part, number, group):
        ctx.part = part
        found = mine.new_zeros(number, *mine.shape[1:])
        found[part] = mine
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0][ctx.part], None, None, None
