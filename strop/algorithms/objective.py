"""The objective: what one optimizer step minimises, put together from `strop.ops` as the options say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from strop import ops
from strop.algorithms.binding import ADVANTAGES, POLICY_LOSSES, dual_clip_of
from strop.config import AlgorithmOptions
from strop.ops.policy_loss import MAX_LOG_RATIO
from strop.types import Metric, StepMetrics


@dataclass(frozen=True)
class TrainableTokens:
    """Per-token tensors of the trainable tokens of one micro-batch, all of shape [N]; only logprobs and entropy carry
    gradient. Masked tokens never get here: they are selected out before anything is computed from them."""

    logprobs: Tensor
    entropy: Tensor | None
    old_logprobs: Tensor  # equal to logprobs, without gradient, where the step needs no second pass
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    sequence_ids: Tensor


class Objective(Protocol):
    """What a trainer needs to know of an objective."""

    uses_reference: bool
    uses_entropy: bool  # with gradient; without one it is measured anyway where that is cheap
    temperature: float

    def loss(self, tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]: ...


class PolicyObjective:
    """Policy loss + KL to the reference - entropy bonus, as the options of `[algorithm]` say."""

    def __init__(self, options: AlgorithmOptions, *, temperature: float, max_response_tokens: int) -> None:
        self.options = options
        self.temperature = temperature
        self.max_response_tokens = max_response_tokens
        self.uses_reference = options.kl.coef > 0
        self.uses_entropy = options.entropy_coef != 0
        self._policy_loss = POLICY_LOSSES[options.policy_loss.kind]
        self._dual_clip = dual_clip_of(options.policy_loss)

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """One number per rollout, from all scored rollouts of the batch at once."""
        return ADVANTAGES[self.options.advantage.kind](self.options.advantage, rewards, group_ids)

    def token_weights(self, loss_mask: Tensor, sequence_ids: Tensor, group_ids: Tensor) -> Tensor:
        """Weights over one whole optimizer step, before it is cut."""
        reduction = self.options.reduction
        return ops.token_weights(
            loss_mask,
            sequence_ids,
            reduction=reduction,
            group_ids=group_ids if reduction == "prompt_mean" else None,
            max_response_tokens=self.max_response_tokens if reduction == "constant_length" else None,
        )

    def loss(self, tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]:
        """Unreduced loss [N] and the metrics of these tokens."""
        options = self.options
        policy = self._policy_loss(options.policy_loss, tokens.logprobs, tokens.old_logprobs, tokens.advantages)
        loss, sums = policy.loss, {"clip_fraction": policy.clipped}
        if self._dual_clip is not None:
            sums["dual_clip_fraction"] = self._dual_clip(tokens.logprobs, tokens.old_logprobs, tokens.advantages)
        if self.uses_reference:
            assert tokens.ref_logprobs is not None, "the trainer computes them because uses_reference is set"
            kl = ops.kl_estimate(tokens.logprobs, tokens.ref_logprobs, kind=options.kl.kind)
            loss = loss + options.kl.coef * kl
            sums[f"kl_ref_{options.kl.kind}"] = kl
        if self.uses_entropy:
            assert tokens.entropy is not None, "the trainer computes it because uses_entropy is set"
            loss = loss - options.entropy_coef * tokens.entropy
        if tokens.entropy is not None:
            sums["entropy"] = tokens.entropy
        return loss, _metrics(tokens, sums)


def _metrics(tokens: TrainableTokens, sums: dict[str, Tensor]) -> StepMetrics:
    """Sums and extremes of one micro-batch, moved to the host in one transfer."""
    with torch.no_grad():
        log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        gap = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
        means = {
            **sums,
            "logprob_gap": gap,
            "kl_old_k3": ops.kl_estimate(tokens.logprobs, tokens.old_logprobs, kind="k3"),
        }
        extremes = {
            "ratio_max": log_ratio.max().exp(),
            "ratio_min": -log_ratio.min().exp(),
            "logprob_gap_max": gap.max(),
        }
        numbers = torch.stack(
            [t.float().sum() for t in means.values()] + [t.float() for t in extremes.values()]
        ).tolist()
    count = tokens.logprobs.numel()
    metrics = {name: Metric.mean(value, count) for name, value in zip(means, numbers[: len(means)], strict=True)}
    high, low, gap_max = numbers[len(means) :]
    return metrics | {
        "ratio_max": Metric("max", high),
        "ratio_min": Metric("min", -low),
        "logprob_gap_max": Metric("max", gap_max),
    }
