"""The trainer `megatron`: a model made of Megatron-Core's layers, over processes that divide layers, stages and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from strop import ops
from strop.algorithms import Objective, TrainableTokens
from strop.config import MegatronTrainerOptions
from strop.data.batch import Batch
from strop.trainers import losses, state
from strop.trainers.adapters import WholeWeights
from strop.trainers.layout import Layout
from strop.trainers.layout_choice import Cutter
from strop.trainers.learner import Learner
from strop.trainers.megatron.groups import Groups
from strop.trainers.megatron.network import build_network
from strop.trainers.megatron.passes import Passes
from strop.trainers.megatron.places import Exchange, Place, find_places
from strop.trainers.megatron.shape import Shape
from strop.trainers.megatron.updates import MegatronUpdates
from strop.trainers.ranks import everywhere
from strop.trainers.rows import are_equal, gap, row_batch
from strop.trainers.torch_trainer import REFERENCE_FILE
from strop.types import Metric, StepMetrics, UserError, WeightSource

if TYPE_CHECKING:
    from strop.trainers.together import TogetherRanks


class MegatronTrainer(Learner):
    """Learns by AdamW on a network of Megatron-Core's that computes what a Hugging Face model does.

    Every rank has a part of the network; `model` in rank 0 is the whole Hugging Face model, which `publish` brings up to date.
    What is called in rank 0 is done in all.

    Args:
        model: a Hugging Face causal language model, on its device; in other ranks without its weights.
        options: the table `[trainer]`.
        total_steps: optimizer steps of the whole run, the length of the schedule.
        max_logprob_gap: mean |engine - trainer| log-probability above which a step is refused.
        keeps_reference: hold a frozen copy of the network as it is now.
        watch: sees the metrics of an update before the optimizer moves, and may raise a GuardError.
        ranks: that share the work, over torch.distributed even if it is one.

    Raises:
        UserError: the model is none that Megatron-Core's layers compute, or so many processes cannot divide it.
    """

    saves_reference: bool
    base_fingerprint = None  # there are no adapters

    def __init__(
        self,
        model: Any,
        options: MegatronTrainerOptions,
        *,
        total_steps: int,
        max_logprob_gap: float = math.inf,
        keeps_reference: bool = False,
        watch: Callable[[StepMetrics], None] = lambda metrics: None,
        ranks: TogetherRanks,
    ) -> None:
        self._shape = Shape.of(model)
        self._shape.check_divides(options)
        self.model, self.ranks, self.options = model.eval(), ranks, options
        self.max_logprob_gap, self._watch = max_logprob_gap, watch
        self.saves_reference = keeps_reference
        self._groups = Groups(ranks, options)
        self._device = ranks.device
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._policy, places, self._exchange = self._made()
        self._reference, _, self._of_reference = self._made() if keeps_reference else (None, {}, None)
        self._cut = Cutter(model, ["padded"], options.max_tokens_per_micro_batch, self._groups)
        self._updates = MegatronUpdates(
            self._policy, places, self._exchange, options, total_steps=total_steps, groups=self._groups
        )
        self._check_equal()

    def _made(self) -> tuple[Passes, dict[str, Place], Exchange]:
        """A network with the weights of rank 0's model."""
        frequencies = self.model.model.rotary_emb.inv_freq
        network = build_network(
            self._shape, self.options, self._groups, dtype=self.model.dtype, frequencies=frequencies
        ).to(self._device)
        places = find_places(network, self._shape, self._groups)
        exchange = Exchange(places, self._shapes, self._groups, self._device)
        exchange.fill(dict(self.model.named_parameters()).__getitem__)
        return Passes(network, self._shape, self._groups, self._device, self.model), places, exchange

    def _check_equal(self) -> None:
        """Raises UserError where the network does not compute what the model does."""
        length = 6
        row = torch.arange(length) % self._shape.vocab_size
        batch = row_batch(row)
        found = self._policy.all_logprobs(batch, self._cut(batch), temperature=1.0)[1:]

        @torch.no_grad()
        def compare() -> None:
            logits = self.model(input_ids=row[None].to(self.model.device), use_cache=False).logits[0, :-1]
            wanted = ops.token_logprobs(logits, row[1:].to(logits.device)).float().cpu()
            if not are_equal(found.to(self.model.dtype), wanted.to(self.model.dtype), rounding=1e-4):
                raise UserError(
                    f"trainer.kind must be torch for {type(self.model).__name__}, got megatron: made of Megatron-Core's layers "
                    f"it does not compute the same (log-probabilities differ by {gap(found, wanted):.2g})."
                )

        self._groups.first(compare)

    @everywhere
    def publish(self) -> None:
        """Bring `model` up to date in rank 0."""
        self.is_torn = True
        whole = dict(self.model.named_parameters())
        for name, values in self._gathered(self._exchange):
            with torch.no_grad():
                whole[name].copy_(values)
        self.is_torn = False

    def _gathered(self, exchange: Exchange) -> Iterator[tuple[str, Tensor]]:
        """In rank 0 the whole weights of a network."""

        def local(parameter: torch.nn.Parameter) -> Tensor | None:
            return parameter.detach().float() if self._groups.share == 0 else None

        for name in self._shapes:
            found = exchange.gathered(name, local)
            if found is not None:
                yield name, found

    @everywhere
    def logprobs(
        self, batch: Batch, *, model: Literal["policy", "reference"] = "policy", temperature: float = 1.0
    ) -> Tensor:
        """Log-probabilities [T] of the batch's trainable tokens, 0 elsewhere; no gradient."""
        chosen = self._policy if model == "policy" else self._reference
        if chosen is None:
            raise ValueError("this trainer was made without a reference; pass keeps_reference=True.")
        return chosen.all_logprobs(batch, self._cut(batch), temperature=temperature)

    @everywhere
    def step(self, batch: Batch, objective: Objective) -> StepMetrics:
        """One optimizer step on the whole batch, as TorchTrainer's, which raises the same."""
        if not batch.loss_mask.any():
            return {"skipped_steps": Metric("sum", 1.0)}
        return self._updates.step(batch, self._cut(batch), partial(self._weighted_loss, objective), self._guard)

    def _weighted_loss(
        self, objective: Objective, part: Batch, laid: Layout, hidden: Tensor
    ) -> tuple[Tensor, StepMetrics]:
        _, tokens = self._tokens_of(objective, part, laid, hidden)
        return losses.weighted(part, objective, tokens)

    def _tokens_of(
        self, objective: Objective, part: Batch, laid: Layout, hidden: Tensor
    ) -> tuple[Tensor, TrainableTokens]:
        with_entropy = objective.uses_entropy or objective.measures_entropy
        logprobs, entropy = self._policy.score(
            part, laid, hidden, temperature=objective.temperature, with_entropy=with_entropy
        )
        return logprobs, losses.trainable(part.to(logprobs.device), logprobs, entropy)

    def _guard(self, metrics: StepMetrics) -> None:
        losses.guard_gap(metrics, self.max_logprob_gap)
        self._watch(metrics)

    @everywhere
    @torch.no_grad()
    def token_losses(self, batch: Batch, objective: Objective) -> tuple[Tensor, Tensor]:
        """Log-probabilities and unreduced losses of a batch that fits memory, both [T], as TorchTrainer's."""
        found = torch.zeros(2, len(batch.tokens))

        def work(part: Batch, laid: Layout, hidden: Tensor) -> tuple[Tensor, None]:
            logprobs, tokens = self._tokens_of(objective, part, laid, hidden)
            of_tokens, _ = objective.loss(tokens)
            found[0, batch.loss_mask], found[1, batch.loss_mask] = logprobs.float().cpu(), of_tokens.float().cpu()
            return logprobs, None

        self._policy.run([batch], work, through=self._policy.network, learns=False)
        if self._groups.share > 0:  # each has made the same passes
            found.zero_()
        self._groups.summed(found)
        return found[0], found[1]

    def weights(self) -> WeightSource:
        """Parameters under their Hugging Face names, tied ones once."""
        return WholeWeights(self.model)

    @everywhere
    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Make the policy as it is now the reference."""
        assert self._reference is not None, "made with keeps_reference=True"
        for kept, now in zip(self._reference.network.parameters(), self._policy.network.parameters(), strict=True):
            kept.copy_(now)

    @everywhere
    def snapshot(self) -> state.Write:
        """Copy weights (float32 masters where there are), moments, the step count and the reference to rank 0's host memory,
        under Hugging Face's names; what is returned writes the copy as TorchTrainer's does, for any number of ranks."""
        own = self._updates.snapshot()
        if self._of_reference is None:
            return own
        reference = {name: values.to(self.model.dtype).cpu() for name, values in self._gathered(self._of_reference)}

        def write(folder: Path) -> None:
            own(folder)
            save_file(reference, folder / REFERENCE_FILE)

        return write

    @everywhere
    def digest(self) -> str:
        """A checksum of the weights (float32 masters where there are)."""
        return self._updates.digest()

    @everywhere
    def load(self, folder: Path) -> None:
        """Read what `save` wrote into this network and optimizer."""
        self._updates.load(folder)
        if self._of_reference is not None:
            path = folder / REFERENCE_FILE
            weights = self._groups.first(lambda: state.read_weights(path, self._shapes)) or {}
            self._of_reference.fill(weights.__getitem__)
        self.publish()
