"""The critic of the trainer `torch`: a value model that learns beside the policy, in the same processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from strop import ops
from strop.config import CriticOptions, TorchTrainerOptions
from strop.data.batch import Batch
from strop.trainers.adamw_updates import AdamWUpdates
from strop.trainers.layout import LayoutKind
from strop.trainers.layout_choice import Cutter, readable
from strop.trainers.learner import Learner
from strop.trainers.ranks import Ranks, everywhere
from strop.trainers.recompute import Recompute
from strop.trainers.sharing import RowSizes
from strop.trainers.state import Write
from strop.trainers.values import ValueModel, ValueScorer
from strop.types import Metric, StepMetrics

_PREFIX = "critic_"  # of its files in a checkpoint, and of its metrics
CRITIC_FILE = f"{_PREFIX}weights.safetensors"  # one of them


class TorchCritic(Learner):
    """Learns to foresee returns by AdamW, with the clipped value loss and the token weights of the policy's step.

    Args:
        model: on its device.
        options: the table `[critic]`.
        layout: the table `[trainer]`, whose layout and token budget of micro-batches are the critic's too.
        total_steps: optimizer steps of the whole run, the length of the schedule.
        ranks: that share the work, as those of TorchTrainer do.
    """

    def __init__(
        self,
        model: ValueModel,
        options: CriticOptions,
        layout: TorchTrainerOptions,
        *,
        total_steps: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model.eval()
        self.ranks = ranks or Ranks()
        self.options = options
        self._learning, within = self.ranks.place(model)
        self._scorer = ValueScorer(self._learning, within)
        self._recompute = Recompute(self._learning.body, is_on=layout.activation_checkpointing, within=within)
        self._cut = Cutter(
            self._learning,
            readable(self._scorer, layout.layout, self.ranks),
            layout.max_tokens_per_micro_batch,
            self.ranks,
        )
        self._updates = AdamWUpdates(
            {name: p for name, p in self._learning.named_parameters() if p.requires_grad},
            options,
            total_steps=total_steps,
            explaining=self._scorer.explaining,
            idle=self._scorer.idle,
            ranks=self.ranks,
            owner="the critic's ",
        )

    @everywhere
    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """Values [T] of the batch's trainable tokens, 0 elsewhere; no gradient."""
        found = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        cut = self._cut(batch)
        for sequences, rows in cut.parts:
            if not sequences:
                self._scorer.idle()
                continue
            part = batch.select(sequences)
            numbers = self._scorer(part, layout=cut.kind, rows=rows)
            found[batch.positions(sequences)[part.loss_mask]] = numbers.cpu()
        return self.ranks.summed(found)

    @everywhere
    def step(self, batch: Batch) -> StepMetrics:
        """One optimizer step on the whole batch, which has old_values, returns and token weights.

        Raises:
            GuardError: before the optimizer moves: a loss or gradient that is not finite (naming the sequences).
            ModelError: before the optimizer moves: a micro-batch that does not fit memory, or that the model cannot read.
        """
        if not batch.loss_mask.any():
            return {}
        cut = self._cut(batch)
        with self._recompute.around_step():
            metrics = self._updates.step(batch, cut, partial(self._weighted_loss, cut.kind))
        names = {"loss": "value_loss", "grad_norm": f"{_PREFIX}grad_norm", "lr": f"{_PREFIX}lr"}
        del metrics["padding_share"]  # that of the policy's step stands for both
        return {names.get(name, name): metric for name, metric in metrics.items()}

    def _weighted_loss(self, kind: LayoutKind, part: Batch, rows: RowSizes | None) -> tuple[Tensor, StepMetrics]:
        assert part.old_values is not None
        assert part.returns is not None
        values, mask = self._scorer(part, layout=kind, rows=rows), part.loss_mask
        old, returns, weights = (
            tensor[mask].to(values.device, values.dtype)
            for tensor in (part.old_values, part.returns, part.token_weights)
        )
        loss, clipped = ops.value_loss(values, old, returns, eps_clip_value=self.options.eps_clip_value)
        metrics = {"value_clip_fraction": Metric.mean(float(clipped.sum()), clipped.numel())}
        return (weights * loss).sum(), metrics

    @everywhere
    def snapshot(self) -> Write:
        """Copy weights, moments and the step count to host memory; what is returned writes the copy beside the policy's
        files, under names of their own."""
        return self._updates.snapshot(prefix=_PREFIX)

    @everywhere
    def digest(self) -> str:
        """A checksum of the weights."""
        return self._updates.digest()

    @everywhere
    def load(self, folder: Path) -> None:
        """Read what a snapshot wrote into this model and optimizer."""
        self._updates.load(folder, prefix=_PREFIX)
        self.publish()
