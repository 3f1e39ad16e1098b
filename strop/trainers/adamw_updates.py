"""Optimizer steps on weights that torch's AdamW moves, in this process or in each rank on its part of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
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
from strop.trainers.sharing import RowSizes
from strop.trainers.updates import Moment, Updates, WeightedLoss
from strop.types import Metric, StepMetrics


class AdamWUpdates(Updates):
    """AdamW on the weights it is given; on those in bfloat16 by float32 masters (see MasterWeights).

    Args:
        parameters: by name, tied ones once.
        explaining: around a backward pass of a micro-batch; turns what the model raises into a ModelError.
        idle: a pass with gradient 0, made while other ranks have a micro-batch and this one has none left.
        options, total_steps, owner: as for Updates.
        ranks: that each hold a part of every weight.
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
        super().__init__(options, total_steps=total_steps, ranks=ranks, owner=owner)
        self._explaining, self._idle = explaining, idle
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

    def _zero_grad(self) -> None:
        self._masters.zero_grad()

    def _accumulate(self, batch: Batch, cut: Cut, weighted_loss: WeightedLoss) -> list[StepMetrics]:
        return [self._pass(batch.select(sequences), rows, weighted_loss) for sequences, rows in cut.parts]

    def _pass(self, part: Batch, rows: RowSizes | None, weighted_loss: WeightedLoss) -> StepMetrics:
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

    def _is_finite(self, part: Batch, weighted_loss: WeightedLoss) -> bool:
        loss, _ = weighted_loss(part, None)  # all gradients are a sum of the same
        loss.backward()
        self._masters.take_gradients()
        gradients = [self._ranks.full(p.grad) for p in self.parameters.values() if p.grad is not None]
        return bool(torch.isfinite(loss)) and all(bool(torch.isfinite(g).all()) for g in gradients)

    def _clip_gradients(self, max_norm: float) -> float:
        return float(self._ranks.clip_gradients(list(self.parameters.values()), max_norm))

    def _move(self) -> None:
        self.optimizer.step()
        self._masters.write_weights()

    def remember(self, *, moments: bool) -> None:
        copies = None
        if moments:
            copies = {
                name: state.copies(self.optimizer.state[p])
                for name, p in self.parameters.items()
                if p in self.optimizer.state
            }
        self._remembered = Moment(self.num_steps, state.copies(self.parameters), copies)

    @torch.no_grad()
    def go_back(self) -> None:
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

    def digest(self, *, beside: str = "") -> str:
        found = zlib.crc32(beside.encode())
        for parameter in self.parameters.values():
            content = self._ranks.full(parameter.detach()).cpu().contiguous().flatten().view(torch.uint8).numpy()
            found = zlib.crc32(content, found)
        return f"{found:08x}"

    def snapshot(self, *, prefix: str = "") -> state.Write:
        return state.snapshot(self.parameters, self.optimizer, self._ranks, num_steps=self.num_steps, prefix=prefix)

    def load(self, folder: Path, *, prefix: str = "") -> None:
        self.num_steps = state.load(folder, self.parameters, self.optimizer, self._ranks, prefix=prefix)
        self._masters.write_weights()
