"""Optimizer steps by Megatron-Core: its gradients in buffers, and its optimizers, distributed or not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.config import MegatronTrainerOptions
from strop.data.batch import Batch
from strop.trainers import state
from strop.trainers.cutting import Cut
from strop.trainers.layout import Layout
from strop.trainers.megatron.groups import Groups
from strop.trainers.megatron.passes import Passes
from strop.trainers.megatron.places import Exchange, Place
from strop.trainers.updates import Moment, Updates, WeightedLoss
from strop.types import Metric, StepMetrics

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Main(NamedTuple):
    """What the optimizer moves of a parameter of this rank: all of it, or the numbers from start to end."""

    tensor: Tensor
    start: int
    end: int


class MegatronUpdates(Updates):
    """AdamW of Megatron-Core on a network of which this rank has a part.

    Args:
        passes: of the network.
        places: of its parameters.
        exchange: of whole weights.
        options: the table `[trainer]`.
        total_steps: optimizer steps of the whole run.
        groups: the ranks.
    """

    def __init__(
        self,
        passes: Passes,
        places: dict[str, Place],
        exchange: Exchange,
        options: MegatronTrainerOptions,
        *,
        total_steps: int,
        groups: Groups,
    ) -> None:
        super().__init__(options, total_steps=total_steps, ranks=groups)
        self._passes, self._exchange, self._groups = passes, exchange, groups
        self._is_distributed = options.distributed_optimizer and groups.num_shares > 1
        self._wrapped = _wrapped(passes.network, is_distributed=self._is_distributed)
        self._megatron = _optimizer(self._wrapped, options, is_distributed=self._is_distributed)
        self.optimizer = self._megatron.optimizer
        for group in self.optimizer.param_groups:  # Megatron leaves this to a schedule of its own
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
        self._mains = dict(self._found_mains())
        copied = {place.parameter for place in places.values() if place.is_copy}
        self._counted = [main for parameter, main in self._mains.items() if parameter not in copied]

    def _found_mains(self) -> Iterator[tuple[nn.Parameter, _Main]]:
        """What the optimizer has in this rank, by the parameter it belongs to."""
        optimizer = self._megatron
        for parameter in self._passes.network.parameters():
            if not self._is_distributed:
                main = getattr(parameter, "main_param", parameter)  # of a narrow one
                yield parameter, _Main(main, 0, parameter.numel())
            elif parameter in optimizer.model_param_group_index_map:
                group, at = optimizer.model_param_group_index_map[parameter]
                part = optimizer._get_model_param_range_map(parameter)["param"]
                yield parameter, _Main(self.optimizer.param_groups[group]["params"][at], part.start, part.end)

    # ---- a step ----

    def _zero_grad(self) -> None:
        self._wrapped.zero_grad_buffer()
        self._megatron.zero_grad()

    def _accumulate(self, batch: Batch, cut: Cut, weighted_loss: WeightedLoss) -> list[StepMetrics]:
        parts = [batch.select(part.sequences) for part in cut.parts if part.sequences]
        return self._backward(parts, weighted_loss)

    def _backward(self, parts: list[Batch], weighted_loss: WeightedLoss) -> list[StepMetrics]:
        """Gradients of these parts, summed over all ranks that have the same weights."""
        from megatron.core.distributed import finalize_model_grads

        def work(part: Batch, laid: Layout, hidden: Tensor) -> tuple[Tensor, StepMetrics]:
            loss, metrics = weighted_loss(part, laid, hidden)
            return loss, metrics | {"loss": Metric("sum", float(loss.detach()))}

        found = self._passes.run(parts, work, through=self._wrapped, learns=True)
        finalize_model_grads([self._wrapped])
        return found

    def _is_finite(self, part: Batch, weighted_loss: WeightedLoss) -> bool:
        found = self._backward([part], weighted_loss)
        is_finite = all(torch.isfinite(p.main_grad).all() for p in self._passes.network.parameters())
        is_finite = is_finite and all(abs(metrics["loss"].total) < torch.inf for metrics in found)
        return all(self._groups.collected(bool(is_finite)))

    @torch.no_grad()
    def _clip_gradients(self, max_norm: float) -> float:
        self._megatron.prepare_grads()
        counts = self._is_distributed or self._groups.share == 0  # shares have the same gradients otherwise
        gradients = [main.tensor.grad for main in self._counted if main.tensor.grad is not None] if counts else []
        norm = torch.nn.utils.get_total_norm(gradients).float().to(self._passes.device) ** 2
        dist.all_reduce(norm)
        norm = norm.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_ does
        for main in self._mains.values():
            if main.tensor.grad is not None:
                main.tensor.grad.mul_(scale)
        return float(norm)

    def _move(self) -> None:
        self._megatron.step_with_ready_grads()

    def _write_weights(self) -> None:
        """Bring the network up to date with what the optimizer has."""
        if hasattr(self._megatron, "_copy_main_params_to_model_params"):
            self._megatron._copy_main_params_to_model_params()
        if self._is_distributed:
            self._wrapped.start_param_sync()

    # ---- what it holds ----

    def remember(self, *, moments: bool) -> None:
        names = {str(at): main for at, main in enumerate(self._mains.values())}
        copies = None
        if moments:
            states = self.optimizer.state
            copies = {name: state.copies(states[main.tensor]) for name, main in names.items() if main.tensor in states}
        weights = state.copies({name: main.tensor for name, main in names.items()})
        self._remembered = Moment(self.num_steps, weights, copies)

    @torch.no_grad()
    def go_back(self) -> None:
        assert self._remembered is not None
        mains = [main.tensor for main in self._mains.values()]
        for name, weights in self._remembered.weights.items():
            mains[int(name)].copy_(weights)
        self._write_weights()
        if self._remembered.moments is None:
            return
        self.num_steps = self._remembered.num_steps
        self._forget_moments()
        for name, found in self._remembered.moments.items():
            main = mains[int(name)]
            for key, value in found.items():  # a count of steps stays on the host
                self.optimizer.state[main][key] = value.to(main.device if value.dim() else "cpu", copy=True)

    def _local(self, of: Callable[[Tensor], Tensor | None]) -> Callable[[nn.Parameter], Tensor | None]:
        """What this rank has of a parameter's weights or moments, as large as the parameter."""

        def local(parameter: nn.Parameter) -> Tensor | None:
            main = self._mains.get(parameter)
            values = None if main is None or not (self._is_distributed or self._groups.share == 0) else of(main.tensor)
            if main is None or values is None:
                return None
            whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            whole.view(-1)[main.start : main.end] = values.detach().flatten()
            return whole

        return local

    def _whole_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        for name in self._exchange.shapes:
            yield name, self._exchange.gathered(name, self._local(lambda main: main))

    def digest(self, *, beside: str = "") -> str:
        found = zlib.crc32(beside.encode())
        for _, whole in self._whole_weights():
            if whole is not None:
                found = zlib.crc32(whole.cpu().flatten().view(torch.uint8).numpy(), found)
        return f"{found:08x}"

    def snapshot(self, *, prefix: str = "") -> state.Write:
        weights = {name: whole.cpu() for name, whole in self._whole_weights() if whole is not None}
        moments = {}
        for moment in _MOMENTS if self.num_steps else ():
            local = self._local(lambda main, of=moment: self.optimizer.state[main][of])
            for name in self._exchange.shapes:
                whole = self._exchange.gathered(name, local)
                if whole is not None:
                    moments[f"{moment}/{name}"] = whole.cpu()
        if moments:  # as torch's AdamW has it, of each weight
            moments |= {f"step/{name}": torch.tensor(float(self.num_steps)) for name in weights}
        return state.writer(weights, moments, num_steps=self.num_steps, prefix=prefix)

    @torch.no_grad()
    def load(self, folder: Path, *, prefix: str = "") -> None:
        weights, moments, num_steps = state.read(folder, self._exchange.shapes, self._groups, prefix=prefix)
        for parameter, part in self._exchange.scattered(weights.__getitem__).items():
            self._set(parameter, part, lambda main: main)
        self._write_weights()
        self.num_steps = num_steps
        self._forget_moments()
        if not self._groups.told(bool(moments)):
            return
        for main in self._mains.values() if self._counts_by_weight else ():
            self.optimizer.state[main.tensor]["step"] = torch.tensor(float(num_steps))
        for moment in _MOMENTS:
            for parameter, part in self._exchange.scattered(lambda name, of=moment: moments[f"{of}/{name}"]).items():
                self._set(parameter, part, lambda main, of=moment: self._new_moment(main, of))

    def _forget_moments(self) -> None:
        """The optimizer as it is after so many steps, of which it remembers nothing."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            if self.num_steps and not self._counts_by_weight:
                group["step"] = self.num_steps
            else:
                group.pop("step", None)

    @property
    def _counts_by_weight(self) -> bool:
        """Torch's AdamW counts its steps for each weight; those of Transformer Engine and Apex, not run in this project's CI,
        for all together."""
        return isinstance(self.optimizer, torch.optim.AdamW)

    def _new_moment(self, main: Tensor, moment: str) -> Tensor:
        found = self.optimizer.state[main][moment] = torch.zeros_like(main, requires_grad=False)
        return found

    def _set(self, parameter: nn.Parameter, whole: Tensor, of: Callable[[Tensor], Tensor]) -> None:
        main = self._mains.get(parameter)
        if main is not None:
            target = of(main.tensor)
            target.copy_(whole.view(-1)[main.start : main.end].view(target.shape))


def _wrapped(network: Any, *, is_distributed: bool) -> Any:
    """The network with its gradients in buffers, which are summed over shares when a step is whole."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=is_distributed)
    return DistributedDataParallel(network.config, options, network)


def _optimizer(wrapped: Any, options: MegatronTrainerOptions, *, is_distributed: bool) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_eps=options.adam_eps,
        bf16=wrapped.config.bf16,
        params_dtype=wrapped.config.params_dtype,
        use_distributed_optimizer=is_distributed,
        clip_grad=0.0,  # strop clips: it has to know the norm before anything moves
    )
    (found,) = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False).chained_optimizers
    return found
