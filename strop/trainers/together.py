"""Several ranks over torch.distributed: rank 0 sends what is to be done, and all do it at the same time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from strop.trainers.divided import check_divided
from strop.trainers.ranks import Ranks
from strop.trainers.sharding import Within, shard, skeleton
from strop.types import GuardError, ModelError, StepMetrics, StropError, merge_metrics

T = TypeVar("T")
Lost = Callable[[BaseException], BaseException]
_FOR_EVER = timedelta(days=365)  # how long others wait for rank 0, which may be sampling


class RefusedError(StropError):
    """Rank 0 ended a method with an error; the other ranks go on with what comes next."""


@dataclass(frozen=True)
class _Make:
    number: int
    kind: Callable[..., Any]
    skeleton: Any
    device_type: str
    args: tuple[Any, ...]
    more: dict[str, Any]
    divided: tuple[int, int]  # layers, rows


@dataclass(frozen=True)
class _Call:
    number: int
    name: str
    args: tuple[Any, ...]
    more: dict[str, Any]


class TogetherRanks(Ranks):
    """One of several ranks. The process group must be there.

    Args:
        timeout_s: how long this rank waits for another one within a method.
        local_rank: which of its machine's devices is this rank's.
        lost: called in rank 0 when the ranks are out of step, with the error that showed it; returns the one to raise, and
            ends the others.
        tensor_parallel, context_parallel: ranks that divide each layer, or each row, among them; rank 0's count for all, when a
            learner is made.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        local_rank: int,
        lost: Lost | None = None,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.tensor_parallel, self.context_parallel = tensor_parallel, context_parallel
        self._arranged = (0, 0)
        self._mesh: Any = None
        self._rows: Any = None  # the ranks that divide rows with this one
        self._local_rank, self._lost, self._timeout_s = local_rank, lost, timeout_s
        patience = timedelta(seconds=timeout_s) if self.is_first else _FOR_EVER
        self._commands = dist.new_group(backend="gloo", timeout=patience)
        self._learners: list[Any] = []
        self._device = torch.device("cpu")
        self._agreed: BaseException | None = None  # the last error that the others know of
        self._is_within = not self.is_first  # a method that all ranks are in

    @property
    def device(self) -> torch.device:
        """That this rank's part of a learner is on."""
        return self._device

    # ---- what rank 0 sends ----

    def _send(self, command: Any) -> None:
        try:
            pickle.dumps(command)
        except Exception as error:  # what pickle raises of what it cannot take
            raise ModelError(
                f"trainer.num_processes must be 1 here: {command!r:.80} cannot be sent: {error}"
            ) from error
        dist.broadcast_object_list([command], src=0, group=self._commands)

    def make(
        self, kind: Callable[..., T], model: Any, *args: Any, here: dict[str, Any] | None = None, **more: Any
    ) -> T:
        self._device = next(model.parameters()).device

        def work() -> T:
            divided = self.tensor_parallel, self.context_parallel
            self._send(_Make(len(self._learners), kind, skeleton(model), self._device.type, args, more, divided))
            self._arrange()
            learner = kind(model, *args, ranks=self, **more, **(here or {}))
            self._learners.append(learner)
            return learner

        return self._in_step(work)

    def everywhere(self, method: Callable[..., T], learner: Any, args: tuple[Any, ...], more: dict[str, Any]) -> T:
        if self._is_within:
            return method(learner, *args, **more)

        def work() -> T:
            self._send(_Call(self._learners.index(learner), method.__name__, args, more))
            return method(learner, *args, **more)

        return self._in_step(work)

    def _in_step(self, work: Callable[[], T]) -> T:
        """Rank 0's part of what all do. After an error that the others did not have, nothing can be asked of them."""
        if not self.is_whole:
            raise StropError("a process of the trainer is lost; nothing can be asked of the others.")
        self._is_within = True
        try:
            return work()
        except BaseException as error:
            if error is self._agreed or isinstance(error, GuardError):
                raise
            self.is_whole = False
            found = error if self._lost is None else self._lost(error)
            if found is error:
                raise
            raise found from error
        finally:
            self._is_within = False

    def end(self) -> None:
        """Let the others go; rank 0 alone."""
        if self.is_whole:
            self.is_whole = False
            with suppress(RuntimeError):  # one that is gone already
                dist.broadcast_object_list([None], src=0, group=self._commands)

    # ---- what the others do with it ----

    def serve(self) -> None:
        """Do what rank 0 asks for until it lets go."""
        while True:
            found: list[Any] = [None]
            dist.broadcast_object_list(found, src=0, group=self._commands)
            (command,) = found
            if command is None:
                return
            try:
                self._do(command)
            except (GuardError, RefusedError):
                continue

    def _do(self, command: _Make | _Call) -> None:
        if isinstance(command, _Call):
            getattr(self._learners[command.number], command.name)(*command.args, **command.more)
            return
        index = self._local_rank if command.device_type == "cuda" else None
        self._device = torch.device(command.device_type, index)
        if index is not None:  # not run in this project's CI
            torch.cuda.set_device(index)
        self.tensor_parallel, self.context_parallel = command.divided
        self._arrange()
        self._learners.append(command.kind(command.skeleton, *command.args, ranks=self, **command.more))

    # ---- what all do together ----

    def _arrange(self) -> None:
        """Ranks side by side divide layers. Those at the same place among them have a part of the weights each; so many of
        them as divide rows, side by side, have one share of a batch."""
        layers, rows = divided = self.tensor_parallel, self.context_parallel
        if self._arranged == divided:
            return
        self._arranged = divided
        self.share, self.num_shares = self.rank // (layers * rows), self.size // (layers * rows)
        grid = torch.arange(self.size).view(-1, rows, layers)
        if layers == 1:
            self._mesh = dist.init_device_mesh(self._device.type, (self.size,), mesh_dim_names=("shards",))
        else:
            flat = grid.flatten(0, 1)
            groups = [self._subgroups(flat.T), self._subgroups(flat)]
            names = ("shards", "layers")
            self._mesh = DeviceMesh.from_group(groups, self._device.type, mesh=flat, mesh_dim_names=names)
        self.divides_rows = rows > 1
        if self.divides_rows:
            self._rows = self._subgroups(grid.transpose(1, 2).flatten(0, 1))

    def _subgroups(self, members: Tensor) -> dist.ProcessGroup:
        """This rank's, of groups that wait as long as all ranks do for one another; by itself torch waits half an hour."""
        mine, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timedelta(seconds=self._timeout_s))
        return mine

    def place(self, model: Any) -> tuple[Any, Within]:
        return self._placed(model, skeleton(model))

    def frozen(self, model: Any) -> tuple[Any, Within]:
        return self._placed(model, skeleton(model).requires_grad_(False))

    def _placed(self, model: Any, bare: Any) -> tuple[Any, Within]:
        split = context = None
        if self.tensor_parallel > 1:
            from strop.trainers.tensor_parallel import LayerSplit

            split = LayerSplit(bare, self._mesh["layers"])
        if self.divides_rows:
            from strop.trainers.context_parallel import ContextSplit

            context = ContextSplit(bare, self._rows, tensor_parallel=self.tensor_parallel)

        def send(tensor: Tensor) -> None:
            dist.broadcast(tensor, src=0)

        whole = model if self.is_first else None
        placed = shard(bare, self._mesh["shards"], self._device, send, whole=whole, split=split, context=context)
        divides = split or context
        if divides is not None:
            check_divided(model, *placed, self.first, divides.refusal)
        return placed

    @torch.no_grad()
    def publish(self, learning: Any, model: Any) -> None:
        whole = dict(model.named_parameters())
        for name, parameter in learning.named_parameters():
            if parameter.requires_grad:
                values = self.full(parameter)
                if self.is_first:
                    whole[name].copy_(values)

    def first(self, work: Callable[[], T]) -> T | None:
        error: Exception | None = None
        found: T | None = None
        if self.is_first:
            try:
                found = work()
            except Exception as raised:  # noqa: BLE001 - raised again as soon as the others know
                error = raised
        outcome = [error is None]
        dist.broadcast_object_list(outcome, src=0, group=self._commands)
        if error is not None:
            self._agreed = error
            raise error
        if not outcome[0]:
            raise RefusedError("rank 0 ended the method with an error.")
        return found

    def told(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._commands)
        return values[0]

    def collected(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def summed(self, numbers: Tensor) -> Tensor:
        if self.divides_rows and self._rows.rank() > 0:
            numbers.zero_()  # those that divide rows have the same
        dist.all_reduce(numbers, group=self._mesh.get_group("shards"))
        return numbers

    def full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if tensor.device_mesh.ndim == 2:  # in the order in which it was divided
            tensor = tensor.redistribute(placements=(Replicate(), tensor.placements[1]))
        return tensor.full_tensor()

    @torch.no_grad()
    def fill(self, tensor: Tensor, values: Tensor | None) -> None:
        assert isinstance(tensor, DTensor)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if values is not None:
            whole.copy_(values)
        dist.broadcast(whole, src=0)
        tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))

    @torch.no_grad()
    def clip_gradients(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        gradients: list[DTensor] = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
        squares = torch.zeros((), device=self._device)
        for is_copied in (False, True):  # those that ranks which divide layers have alike count once
            parts = [g.to_local() for g in gradients if self._is_copied(g) == is_copied]
            squares += torch.nn.utils.get_total_norm(parts) ** 2 / (self.tensor_parallel if is_copied else 1)
        dist.all_reduce(squares)
        norm = squares.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_ does
        for gradient in gradients:
            gradient.to_local().mul_(scale)
        return norm

    def _is_copied(self, tensor: DTensor) -> bool:
        return tensor.device_mesh.ndim == 1 or tensor.placements[1].is_replicate()

    def merged(self, metrics: StepMetrics) -> StepMetrics:
        return merge_metrics(self.collected(metrics)[:: self.tensor_parallel * self.context_parallel])
