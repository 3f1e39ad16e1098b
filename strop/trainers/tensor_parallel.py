"""Layers that are divided over ranks (tensor parallelism): by the plan that transformers has of a model, its embedding and head
by ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from strop.types import UserError

# transformers' names of what is done with a layer; those of experts and of fused matrices are others
_STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    # of queries or keys, each head by itself: their heads lie in dimension 2, and the gradient is the sum over ranks
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
_EMBEDDING = RowwiseParallel(input_layouts=Replicate())
_HEAD = ColwiseParallel(output_layouts=Replicate())  # where it is called; log-probabilities take its rows alone


def _generic(name: str) -> str:
    """A name as plans have it: model.layers.*.mlp for that of every layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class _Planned:
    """What is done with each module of a model, by its name."""

    def __init__(self, model: Any, size: int) -> None:
        self._name, self._size = type(model).__name__, size
        self.styles: dict[str, ParallelStyle] = {}
        plan = model.tp_plan or {}
        if not plan:
            raise self.refusal("transformers has no plan of how its layers are divided (tp_plan)")
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.is_tied = self.head is not None and self.head.weight is self.embedding.weight
        self._check_heads(model.config.get_text_config())
        for name, module in model.named_modules():
            style = self._style(name, module, plan.get(_generic(name)))
            if style is not None:
                self.styles[name] = style
        self._check_the_rest(model, plan)

    def refusal(self, reason: str) -> UserError:
        return UserError(f"trainer.tensor_parallel must be 1 for {self._name}, got {self._size}: {reason}.")

    def _check_heads(self, settings: Any) -> None:
        for key in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(settings, key, None)
            if number is not None and number % self._size:
                raise UserError(
                    f"trainer.tensor_parallel must divide {key} of {self._name}, {number}, got {self._size}."
                )

    def _check_the_rest(self, model: Any, plan: dict[str, str]) -> None:
        """A weight beside divided ones sees a part of their numbers: nobody would add its gradient up."""
        divided = {name.rpartition(".")[0] for name, style in self.styles.items() if style in _STYLES.values()}
        for name, _ in model.named_parameters():
            module = name.rpartition(".")[0]
            if _generic(name) in plan:
                raise self.refusal(
                    f"the plan of transformers has {name} as {plan[_generic(name)]}, which strop cannot divide"
                )
            if module not in self.styles and any(name.startswith(f"{parent}.") for parent in divided):
                raise self.refusal(f"the plan of transformers leaves {module} out, beside layers that are divided")

    def _style(self, name: str, module: nn.Module, style: str | None) -> ParallelStyle | None:
        if module is self.head:
            return _HEAD
        if module is self.embedding:
            return _EMBEDDING
        if style is None:
            return None
        if style not in _STYLES:
            raise self.refusal(f"the plan of transformers has {name} as {style}, which strop cannot divide")
        if isinstance(module, nn.Linear):
            width, what = (module.in_features, "inputs") if style == "rowwise" else (module.out_features, "outputs")
            if width % self._size:
                raise self.refusal(f"{name} has {width} {what}")
        return _STYLES[style]


def check_divides(model: Any, size: int) -> None:
    """Can so many ranks divide the layers of this model?

    Args:
        model: a Hugging Face causal language model, or what has its `config`, `tp_plan` and embeddings.

    Raises:
        UserError: transformers has no plan of the model, one with parts that cannot be divided here, or numbers that the
            ranks do not divide.
    """
    _Planned(model, size)


class LayerSplit:
    """A model, divided over the ranks of a mesh: of a matrix each has the rows or columns of its own heads.

    Args:
        model: as for `check_divides`.
        mesh: of one dimension.

    Raises:
        UserError: as `check_divides`.
    """

    def __init__(self, model: Any, mesh: Any) -> None:
        self._mesh, self._planned = mesh, _Planned(model, mesh.size())
        self._styles = dict(self._planned.styles)

    def apply(self, unit: nn.Module, where: str) -> None:
        """Leave this rank its part of what is in a unit, whose weights are there, and was not divided before."""
        for path, module in unit.named_modules(prefix=where):
            style = self._styles.pop(path, None)
            if style is not None:
                parallelize_module(module, self._mesh, style, src_data_rank=None)
            if style is _EMBEDDING:
                _keep_padding(module)
        if self._planned.is_tied:
            self._planned.head.weight = self._planned.embedding.weight

    @property
    def refusal(self) -> Callable[[str], UserError]:
        """An error that says why the model cannot be divided."""
        return self._planned.refusal


def _keep_padding(embedding: Any) -> None:
    """The vector of a padding token gets no gradient where it is read; torch finds it in a whole embedding only."""
    padding, embedding.padding_idx = embedding.padding_idx, None
    if padding is not None:
        embedding.register_forward_hook(partial(_without_gradient, padding))


def _without_gradient(padding: int, _: nn.Module, given: tuple[DTensor, ...], found: Tensor) -> Tensor:
    is_padding = given[0].to_local() == padding
    return torch.where(is_padding[..., None], found.detach(), found)


def rows_here(head: nn.Linear) -> tuple[Tensor, Tensor | None, ProcessGroup | None]:
    """Rows and bias of a head that this rank has, and the ranks that have the others; a whole head's, and None."""
    if not isinstance(head.weight, DTensor):
        return head.weight, head.bias, None
    bias: Any = head.bias
    return head.weight.to_local(), None if bias is None else bias.to_local(), head.weight.device_mesh.get_group()


def whole(tensor: Tensor) -> Tensor:
    """All of a weight that may be divided over the ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
