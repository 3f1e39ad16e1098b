"""Forward and backward passes of a network of which every rank has a part, and what is computed of them at the last stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strop import ops
from strop.data.batch import Batch
from strop.trainers.cutting import Cut
from strop.trainers.forward import rows_at
from strop.trainers.layout import Layout, lay_out
from strop.trainers.megatron.groups import Groups
from strop.trainers.megatron.shape import Shape
from strop.trainers.rows import explaining

# Of a micro-batch, its layout and hidden states L x B x H: a number to go backward from, and what is kept of it.
Work = Callable[[Batch, Layout, Tensor], tuple[Tensor, Any]]


class Passes:
    """Passes through the stages of one network.

    Args:
        network: this rank's part of it.
        shape: of the whole.
        groups: the ranks.
        device: that it is on.
        model: the Hugging Face model that it is one of, in messages.
    """

    def __init__(self, network: Any, shape: Shape, groups: Groups, device: torch.device, model: Any) -> None:
        self.network, self._shape, self._groups, self.device, self._model = network, shape, groups, device, model

    def run(self, parts: Sequence[Batch], work: Work, *, through: Any, learns: bool) -> list[Any]:
        """Micro-batches through all stages, each forward and, if it learns, backward. What the work kept of each, at the last
        stage; [] at the others. Gradients are those of this share alone.

        Args: through, the network, or what wraps it.
        """
        if not parts:
            return []
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(waiting: Any, network: Any) -> tuple[Tensor, Any]:
            part = next(waiting)
            laid = lay_out(part, "padded")
            tokens, positions = (tensor.to(self.device) for tensor in (laid.input_ids, laid.position_ids))
            return network(tokens, positions, None), partial(self._kept, work, part, laid)

        self.network.train(learns)  # it drops nothing out; layers keep their inputs alone only where they learn
        longest = max(parts, key=lambda part: max(part.lengths))
        with explaining(self._model, longest, "padded"), torch.set_grad_enabled(learns):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(parts),
                model=[through],
                num_microbatches=len(parts),
                seq_length=max(longest.lengths),
                micro_batch_size=1,
                forward_only=not learns,
            )

    def _kept(self, work: Work, part: Batch, laid: Layout, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        number, kept = work(part, laid, hidden)
        return number, torch.zeros((), dtype=torch.int32), kept  # no tokens to divide by: losses are weighted

    def score(
        self, part: Batch, laid: Layout, hidden: Tensor, *, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] and entropies [N] of the N trainable tokens of a micro-batch, at the last stage."""
        mask = part.loss_mask
        rows = hidden.transpose(0, 1).flatten(0, 1)
        predicting = laid.before[mask].to(self.device)
        weight = self._head()
        return ops.linear_logprobs(
            rows_at(rows, predicting).to(weight.dtype),
            weight,
            part.tokens[mask].to(self.device),
            temperature=temperature,
            with_entropy=with_entropy,
            group=self._groups.layers if self._groups.tensor_parallel > 1 else None,
        )

    def _head(self) -> Tensor:
        """The rows of the head that this rank has, without those beyond the vocabulary."""
        network = self.network
        weight = network.shared_embedding_or_output_weight() if self._shape.is_tied else network.output_layer.weight
        left = self._shape.vocab_size - self._groups.layer_rank * len(weight)
        return weight[: max(0, min(len(weight), left))]

    def all_logprobs(self, batch: Batch, cut: Cut, *, temperature: float) -> Tensor:
        """Log-probabilities [T] of a batch's trainable tokens, 0 elsewhere; no gradient. All ranks get those of all shares."""

        def work(part: Batch, laid: Layout, hidden: Tensor) -> tuple[Tensor, Tensor]:
            logprobs, _ = self.score(part, laid, hidden, temperature=temperature, with_entropy=False)
            return logprobs, logprobs.float().cpu()

        found = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        whole = [part for part in cut.parts if part.sequences]
        parts = [batch.select(part.sequences) for part in whole]
        kept = self.run(parts, work, through=self.network, learns=False)
        for (sequences, _), part, numbers in zip(whole, parts, kept, strict=False):  # nothing is kept at other stages
            found[batch.positions(sequences)[part.loss_mask]] = numbers
        return self._groups.summed(found)
