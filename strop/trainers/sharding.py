"""Models of which every rank holds a part (FSDP2), made without a second whole copy in any of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from strop.types import ModelError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from strop.trainers.context_parallel import ContextSplit
    from strop.trainers.tensor_parallel import LayerSplit

T = TypeVar("T")
_NARROW = (torch.bfloat16, torch.float16)


class Within(nn.Module):
    """The root of a sharded model: weights that no layer gathers for itself are whole within its calls.

    Args:
        model: its layers are sharded already.
        dtype: that it computes in; its weights may be float32 masters of it.
        context: divides rows over ranks, and what is computed of them.
    """

    def __init__(self, model: Any, dtype: torch.dtype, context: ContextSplit | None = None) -> None:
        super().__init__()
        self.model, self.dtype, self.context = model, dtype, context

    def forward(self, work: Callable[[], T]) -> T:
        return work()

    def head_rows(self, head: nn.Linear) -> tuple[Tensor, Tensor | None, ProcessGroup | None]:
        """Of a head within a call: the rows and the bias that this rank has, and the ranks that have the others, if any."""
        from strop.trainers.tensor_parallel import rows_here

        return rows_here(head)

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a weight within a call."""
        from strop.trainers.tensor_parallel import whole

        return whole(tensor)


def skeleton(model: Any) -> Any:
    """The model without its weights: parameters on the device meta, buffers as they are. It can be pickled."""
    bare = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, bare)


def shard(
    model: Any,
    mesh: Any,
    device: torch.device,
    send: Callable[[Tensor], None],
    *,
    whole: Any = None,
    split: LayerSplit | None = None,
    context: ContextSplit | None = None,
) -> tuple[Any, Within]:
    """Fill a skeleton, one layer after the other, with the values of rank 0, and leave each rank its part of every weight.

    Weights that learn in a narrow type become float32, computed with in the narrow type: the shards are the optimizer's
    masters. Gradients are summed over ranks in float32.

    Args:
        model: a skeleton.
        mesh: of the ranks that each hold a part of every weight, or of what a split leaves of it.
        device: that the parts lie on.
        send: fills a tensor, on the device, with what rank 0 has in it.
        whole: in rank 0 the model with its weights.
        split: divides layers over other ranks first.
        context: divides rows over some of the ranks of the mesh.

    Raises:
        ModelError: weights of one layer learn in several types.
    """
    from torch.distributed.fsdp import fully_shard

    dtype, made = model.dtype, {}
    values = {} if whole is None else dict(whole.named_parameters(remove_duplicate=False))
    sharded: list[Any] = []
    for name, layer in _layers(model):
        precision = _precision(layer, model)
        _materialise(layer, name, values, made, device, send)
        if split is not None:
            split.apply(layer, name)
        fully_shard(layer, mesh=mesh, **precision)
        sharded.append(layer)
    precision = _precision(model, model)
    _materialise(model, "", values, made, device, send)
    if split is not None:
        split.apply(model, "")
    within = Within(model, dtype, context)
    fully_shard(within, mesh=mesh, reshard_after_forward=True, **precision)
    for part in (*sharded, within):
        part.set_gradient_divide_factor(1.0)  # a sum: token weights belong to the whole step
        part.set_force_sum_reduction_for_comms(True)
    return model, within


def _layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """What is gathered and freed as one."""
    kinds = set(model._no_split_modules or ())  # of transformers: a layer, by the name of its class
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            yield name, module


def _precision(unit: nn.Module, model: Any) -> dict[str, Any]:
    """How the weights of a unit that have no values yet are gathered and their gradients summed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    types = {p.dtype for p in unit.parameters() if p.is_meta and p.requires_grad}
    if not types & set(_NARROW):
        return {}
    if len(types) > 1:
        raise ModelError(
            f"trainer.num_processes must be 1 for {type(model).__name__}: weights that are gathered together learn in "
            f"several types ({', '.join(sorted(map(str, types)))})."
        )
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=types.pop(), reduce_dtype=torch.float32)}


def _materialise(
    unit: nn.Module,
    where: str,
    values: dict[str, Tensor],
    made: dict[int, nn.Parameter],
    device: torch.device,
    send: Callable[[Tensor], None],
) -> None:
    """Give parameters their values, whole, and buffers their device; a tied weight stays one."""
    for path, module in unit.named_modules(prefix=where):
        for name, bare in module._parameters.items():
            if bare is None or not bare.is_meta:
                continue
            if id(bare) not in made:
                made[id(bare)] = _filled(bare, values.get(f"{path}.{name}" if path else name), device, send)
            module._parameters[name] = made[id(bare)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _filled(bare: Tensor, value: Tensor | None, device: torch.device, send: Callable[[Tensor], None]) -> nn.Parameter:
    learns_narrow = bare.requires_grad and bare.dtype in _NARROW
    whole = torch.empty(bare.shape, dtype=bare.dtype, device=device)
    if value is not None:
        whole.copy_(value.detach())
    send(whole)
    return nn.Parameter(whole.float() if learns_narrow else whole, bare.requires_grad)
