"""The trainer `torch`: one Hugging Face model, AdamW, in this process or in several (FSDP2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from strop.algorithms import Objective, TrainableTokens
from strop.config import TorchTrainerOptions
from strop.data.batch import Batch
from strop.trainers import losses, state
from strop.trainers.adamw_updates import AdamWUpdates
from strop.trainers.adapters import WholeWeights, has_adapters, without_adapters
from strop.trainers.forward import TokenScorer
from strop.trainers.layout import LayoutKind
from strop.trainers.layout_choice import Cutter, readable
from strop.trainers.learner import Learner
from strop.trainers.ranks import Ranks, everywhere
from strop.trainers.recompute import Recompute
from strop.trainers.sharing import RowSizes
from strop.trainers.teacher import fingerprint
from strop.types import Metric, StepMetrics, WeightSource

REFERENCE_FILE = "reference.safetensors"  # in a checkpoint, of a run that has one


class TorchTrainer(Learner):
    """Learns by AdamW on the model it is given; one in bfloat16 by float32 masters of its weights (see MasterWeights).

    Of several ranks each has a part of every weight and makes its share of a step's passes; `model` in rank 0 is then a
    whole copy, which `publish` brings up to date. What is called in rank 0 is done in all.

    Args:
        model: a Hugging Face causal language model, on its device.
        options: the table `[trainer]`.
        total_steps: optimizer steps of the whole run, the length of the schedule.
        max_logprob_gap: mean |engine - trainer| log-probability above which a step is refused.
        keeps_reference: hold a frozen copy of the model as it is now; one with adapters needs none: it is itself without them.
        watch: sees the metrics of an update before the optimizer moves, and may raise a GuardError.
        ranks: that share the work.
    """

    def __init__(
        self,
        model: Any,
        options: TorchTrainerOptions,
        *,
        total_steps: int,
        max_logprob_gap: float = math.inf,
        keeps_reference: bool = False,
        watch: Callable[[StepMetrics], None] = lambda metrics: None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model.eval()  # no dropout: the sampler has none, and the two must agree
        self.ranks = ranks or Ranks()
        self.options = options
        self.max_logprob_gap = max_logprob_gap
        self._watch = watch
        self._has_adapters = has_adapters(model)
        self._keeps_reference = keeps_reference
        copies = keeps_reference and not self._has_adapters  # else the reference is the model without its adapters
        self._reference = TokenScorer(*self.ranks.frozen(model)) if copies else None
        self._learning, within = self.ranks.place(model)
        self._policy = TokenScorer(self._learning, within)
        self._cut = Cutter(
            self._learning,
            readable(self._policy, options.layout, self.ranks),
            options.max_tokens_per_micro_batch,
            self.ranks,
        )
        self._recompute = Recompute(self._learning, is_on=options.activation_checkpointing, within=within)
        self._updates = AdamWUpdates(
            {name: p for name, p in self._learning.named_parameters() if p.requires_grad},
            options,
            total_steps=total_steps,
            explaining=self._policy.explaining,
            idle=self._policy.idle,
            ranks=self.ranks,
        )

    @property
    def saves_reference(self) -> bool:
        """Does a checkpoint hold the reference? Below adapters it is the model itself."""
        return self._reference is not None

    @everywhere
    def set_total_steps(self, total_steps: int) -> None:
        """The length of the schedule, where it shows only after the trainer was made."""
        self._updates.total_steps = total_steps

    @everywhere
    def logprobs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy", temperature: float = 1.0
    ) -> Tensor:
        """Log-probabilities [T] of the batch's trainable tokens, 0 elsewhere; no gradient."""
        if model == "reference" and not self._keeps_reference:
            raise ValueError("this trainer was made without a reference; pass keeps_reference=True.")
        scorer = self._policy if model == "policy" or self._reference is None else self._reference
        with without_adapters(self._learning) if model == "reference" and self._has_adapters else nullcontext():
            found = scorer.all_logprobs(batch, self._cut(batch), temperature=temperature)
        return self.ranks.summed(found)

    @everywhere
    def step(self, batch: Batch, objective: Objective) -> StepMetrics:
        """One optimizer step on the whole batch, in micro-batches; the sum of weight x loss over all of them.

        Raises:
            GuardError: before the optimizer moves: a loss or gradient that is not finite (naming the sequences), or a
                gap between engine and trainer above its bound.
            ModelError: before the optimizer moves: a micro-batch that does not fit memory, or that the model cannot read.
        """
        if not batch.loss_mask.any():
            return {"skipped_steps": Metric("sum", 1.0)}
        cut = self._cut(batch)
        with self._recompute.around_step():
            weighted_loss = partial(self._weighted_loss, objective, cut.kind)
            return self._updates.step(batch, cut, weighted_loss, self._guard)

    def _weighted_loss(
        self, objective: Objective, kind: LayoutKind, part: Batch, rows: RowSizes | None
    ) -> tuple[Tensor, StepMetrics]:
        _, selected = self._tokens_of(part, objective, kind, rows)
        return losses.weighted(part, objective, selected)

    def _tokens_of(
        self, part: Batch, objective: Objective, kind: LayoutKind, rows: RowSizes | None = None
    ) -> tuple[Tensor, TrainableTokens]:
        """Log-probabilities of the trainable tokens as they are now, and all that their loss is made of."""
        with_entropy = objective.uses_entropy or objective.measures_entropy
        logprobs, entropy = self._policy(
            part, temperature=objective.temperature, layout=kind, with_entropy=with_entropy, rows=rows
        )
        return logprobs, losses.trainable(part.to(logprobs.device), logprobs, entropy)

    def _guard(self, metrics: StepMetrics) -> None:
        losses.guard_gap(metrics, self.max_logprob_gap)
        self._watch(metrics)

    def weights(self) -> WeightSource:
        """Parameters under their Hugging Face names, tied ones once; adapters are added to what they adapt."""
        return WholeWeights(self.model)

    @everywhere
    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference, which must be a copy."""
        assert self._reference is not None, "made with keeps_reference=True, without adapters"
        for kept, now in zip(self._reference.model.parameters(), self._learning.parameters(), strict=True):
            kept.copy_(now)

    @cached_property
    def base_fingerprint(self) -> str | None:
        """Of the frozen weights below adapters, which a checkpoint does not hold; None where there are none."""
        if not self._has_adapters:
            return None
        return fingerprint({name: p for name, p in self.model.named_parameters() if not p.requires_grad})

    @everywhere
    def snapshot(self) -> state.Write:
        """Copy weights (float32 masters where there are), moments, the step count and the reference to host memory; what is
        returned writes the copy as safetensors and JSON, whatever the trainer does meanwhile. The reference is copied too,
        because the folder it was loaded from may hold another model when it is wanted."""
        own = self._updates.snapshot()
        if self._reference is None:
            return own
        reference = state.snapshot_weights(REFERENCE_FILE, self._reference_weights(), self.ranks)

        def write(folder: Path) -> None:
            own(folder)
            reference(folder)

        return write

    def _reference_weights(self) -> dict[str, Tensor]:
        return {} if self._reference is None else dict(self._reference.model.named_parameters())

    def digest(self) -> str:
        """A checksum of the weights (float32 masters where there are), of those below adapters too."""
        return self._digest(self.base_fingerprint or "")

    @everywhere
    def _digest(self, beside: str) -> str:
        return self._updates.digest(beside=beside)

    @everywhere
    @torch.no_grad()
    def token_losses(self, batch: Batch, objective: Objective) -> tuple[Tensor, Tensor]:
        """Log-probabilities as they are now and unreduced losses, both [T] with 0 in masked slots, for reading.

        Args:
            batch: one that fits memory, ready for `step`.
            objective: as for `step`.
        """
        logprobs, selected = self._tokens_of(batch, objective, "padded")
        of_tokens, _ = objective.loss(selected)
        found = torch.zeros(2, len(batch.tokens))
        found[0, batch.loss_mask], found[1, batch.loss_mask] = logprobs.float().cpu(), of_tokens.float().cpu()
        return found[0], found[1]

    @everywhere
    def load(self, folder: Path) -> None:
        """Read what `save` wrote into this model and optimizer."""
        self._updates.load(folder)
        if self._reference is not None:
            state.load_weights(folder / REFERENCE_FILE, self._reference_weights(), self.ranks)
        self.publish()
