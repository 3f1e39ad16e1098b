"""From log-probabilities to the loss of a micro-batch, and when a step is refused: the same in every trainer."""

from __future__ import annotations

from torch import Tensor

from strop.algorithms import Objective, TrainableTokens
from strop.data.batch import Batch
from strop.types import GuardError, StepMetrics


def trainable(part: Batch, logprobs: Tensor, entropy: Tensor | None) -> TrainableTokens:
    """The trainable tokens of a micro-batch; masked slots are dropped here, before any arithmetic."""
    mask = part.loss_mask

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[mask]

    old = pick(part.old_logprobs)
    return TrainableTokens(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=logprobs.detach() if old is None else old,
        rollout_logprobs=part.rollout_logprobs[mask],
        ref_logprobs=pick(part.ref_logprobs),
        advantages=part.advantages[mask],
        sequence_ids=part.sequence_ids[mask],
        selected=pick(part.selected),
        likelihood=pick(part.likelihood),
        is_fresh=pick(part.is_fresh),
        measures_gap=part.measures_gap,
    )


def weighted(part: Batch, objective: Objective, tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]:
    """The sum of weight x loss over the trainable tokens of a micro-batch, and what the objective measures of them."""
    losses, metrics = objective.loss(tokens)
    weights = part.token_weights[part.loss_mask].to(losses.device, losses.dtype)
    return (weights * losses).sum(), metrics


def guard_gap(metrics: StepMetrics, bound: float) -> None:
    """Raises GuardError where engine and trainer differ by more nats per token, on average."""
    gap = metrics.get("logprob_gap")
    if gap is not None and not gap.value <= bound:
        raise GuardError(
            f"guards.max_logprob_gap must hold: engine and trainer differ by {gap.value:.3g} nats per token on average "
            f"(bound {bound:g}, largest {metrics['logprob_gap_max'].value:.3g}). The step was not made. "
            "They do not compute the same policy: look at weights, dtype, temperature and end tokens.",
            guard="logprob_gap",
        )
