"""Optimizer steps in micro-batches: what the policy's trainer and the critic's have in common."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.config import AdamWOptions
from strop.data.batch import Batch
from strop.trainers import state
from strop.trainers.cutting import Cut
from strop.trainers.masters import MasterWeights
from strop.trainers.ranks import Ranks
from strop.trainers.schedule import lr_factor
from strop.trainers.sharing import RowSizes
from strop.types import GuardError, Metric, StepMetrics, merge_metrics

# A micro-batch, and what stands in its rows, to its weighted loss, which carries gradient, and its metrics.
WeightedLoss = Callable[[Batch, RowSizes | None], tuple[Tensor, StepMetrics]]


@dataclass(frozen=True)
class _Moment:
    """Weights, and what an optimizer remembers if that was asked for, as they were: copies in host memory, of what is this
    rank's."""

    num_steps: int
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] | None


class Updates:
    """AdamW on the weights it is given; on those in bfloat16 by float32 masters (see MasterWeights).

    Args:
        parameters: by name, tied ones once.
        options: AdamW and its learning rate.
        total_steps: optimizer steps of the whole run, the length of the schedule; may be set anew.
        explaining: around a backward pass of a micro-batch; turns what the model raises into a ModelError.
        idle: a pass with gradient 0, made while other ranks have a micro-batch and this one has none left.
        ranks: that each hold a part of every weight.
        owner: whose loss it is, in messages: "" or "the critic's ".
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        options: AdamWOptions,
        *,
        total_steps: int,
        explaining: Callable[[Batch], AbstractContextManager[None]],
        idle: Callable[[], Tensor],
        ranks: Ranks,
        owner: str = "",
    ) -> None:
        self.options = options
        self.total_steps = total_steps
        self.num_steps = 0  # made
        self._explaining, self._idle, self._ranks = explaining, idle, ranks
        self._owner = owner
        self._remembered: _Moment | None = None
        self._masters = MasterWeights(parameters)
        self.parameters = self._masters.by_name  # what AdamW moves and a checkpoint holds
        self.optimizer = torch.optim.AdamW(
            self._parameter_groups(),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.adam_eps,
            fused=True,  # one pass over each weight: 3 to 8 times as fast on CPU as one operation after another
        )

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices decay; norms and biases do not."""
        matrices = [p for p in self.parameters.values() if p.dim() >= 2]
        vectors = [p for p in self.parameters.values() if p.dim() < 2]
        return [
            {"params": matrices, "weight_decay": self.options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    def step(
        self,
        batch: Batch,
        cut: Cut,
        weighted_loss: WeightedLoss,
        guard: Callable[[StepMetrics], None] = lambda metrics: None,
    ) -> StepMetrics:
        """One optimizer step on the whole batch: the sum of weight x loss over its micro-batches.

        Args:
            batch: with at least one trainable token.
            cut: of the batch into micro-batches.
            weighted_loss: of a micro-batch.
            guard: sees the metrics before the optimizer moves, and may raise.

        Raises:
            GuardError: before the optimizer moves: a loss or gradient that is not finite (naming the sequences).
            ModelError: before the optimizer moves: a micro-batch that does not fit memory, or that the model cannot read.
        """
        self._masters.zero_grad()
        parts = [self._accumulate(batch.select(sequences), rows, weighted_loss) for sequences, rows in cut.parts]
        metrics = self._ranks.merged(merge_metrics([*parts, cut.metrics()]))
        metrics["loss"] = Metric.mean(metrics["loss"].total, 1)  # parts add up to the step's loss; steps are averaged
        if not math.isfinite(metrics["loss"].total):
            raise self._blaming(batch, weighted_loss)
        self._ranks.first(lambda: guard(metrics))
        norm = self._ranks.clip_gradients(list(self.parameters.values()), self.options.max_grad_norm)
        if not torch.isfinite(norm):
            raise self._blaming(batch, weighted_loss)
        lr = self._set_lr()
        self.optimizer.step()
        self._masters.write_weights()
        self._masters.zero_grad()
        self.num_steps += 1
        return metrics | {"grad_norm": Metric.mean(float(norm), 1), "lr": Metric("max", lr)}

    def _accumulate(self, part: Batch, rows: RowSizes | None, weighted_loss: WeightedLoss) -> StepMetrics:
        """Forward and backward of one micro-batch; of an empty one a pass that learns nothing."""
        if not part.num_sequences:
            self._idle().backward()
            self._masters.take_gradients()
            return {}
        loss, metrics = weighted_loss(part, rows)
        with self._explaining(part):
            loss.backward()
        self._masters.take_gradients()
        return metrics | {"loss": Metric("sum", float(loss.detach()))}

    def _blaming(self, batch: Batch, weighted_loss: WeightedLoss) -> GuardError:
        """What to raise: which sequences make the loss or the gradient not finite, each tried alone."""
        guilty = []
        for index, name in enumerate(batch.names):
            part = batch.select([index])
            if not part.loss_mask.any():
                continue
            self._masters.zero_grad()
            # every rank makes the same pass, and all gradients are a sum of the same
            loss, _ = weighted_loss(part, None)
            loss.backward()
            self._masters.take_gradients()
            gradients = [self._ranks.full(p.grad) for p in self.parameters.values() if p.grad is not None]
            if not torch.isfinite(loss) or not all(torch.isfinite(g).all() for g in gradients):
                guilty.append(name)
        self._masters.zero_grad()
        named = ", ".join(guilty[:5]) + (f" and {len(guilty) - 5} more" if len(guilty) > 5 else "")
        return GuardError(
            f"{self._owner}loss or gradient is not finite; the step was not made. "
            f"It comes from {named or 'no sequence alone'}.",
            guard="non_finite",
            blamed=guilty,
        )

    def _set_lr(self) -> float:
        options = self.options
        lr = options.lr * lr_factor(
            self.num_steps,
            total_steps=self.total_steps,
            warmup_steps=options.warmup_steps,
            schedule=options.lr_schedule,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def remember(self, *, moments: bool) -> None:
        """Keep a copy of the weights, and with `moments` of what the optimizer remembers, to go back to."""
        copies = None
        if moments:
            copies = {
                name: state.copies(self.optimizer.state[p])
                for name, p in self.parameters.items()
                if p in self.optimizer.state
            }
        self._remembered = _Moment(self.num_steps, state.copies(self.parameters), copies)

    @torch.no_grad()
    def go_back(self) -> None:
        """Set the weights to what was remembered, and the optimizer to what it was if its moments were."""
        assert self._remembered is not None
        for name, parameter in self.parameters.items():
            parameter.copy_(self._remembered.weights[name])
        self._masters.write_weights()
        if self._remembered.moments is None:
            return
        self.num_steps = self._remembered.num_steps
        self.optimizer.state.clear()
        for name, found in self._remembered.moments.items():
            parameter = self.parameters[name]
            self.optimizer.state[parameter] = {
                key: value.to(parameter.device, copy=True) for key, value in found.items()
            }

    def forget(self) -> None:
        """Free what was remembered."""
        self._remembered = None

    def digest(self, *, beside: str = "") -> str:
        """A checksum of the weights, and of a text, eight hexadecimal digits: equal weights have equal ones, others hardly
        ever."""
        found = zlib.crc32(beside.encode())
        for parameter in self.parameters.values():
            content = self._ranks.full(parameter.detach()).cpu().contiguous().flatten().view(torch.uint8).numpy()
            found = zlib.crc32(content, found)
        return f"{found:08x}"

    def snapshot(self, *, prefix: str = "") -> state.Write:
        """Copy weights (float32 masters where there are), moments and the step count; what is returned writes them."""
        return state.snapshot(self.parameters, self.optimizer, self._ranks, num_steps=self.num_steps, prefix=prefix)

    def load(self, folder: Path, *, prefix: str = "") -> None:
        """Read what a snapshot wrote."""
        self.num_steps = state.load(folder, self.parameters, self.optimizer, self._ranks, prefix=prefix)
        self._masters.write_weights()
