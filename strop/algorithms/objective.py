"""The objective: what one optimizer step minimises, put together from `strop.ops` as the options say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from strop import ops
from strop.algorithms.controllers import adapted_entropy_coef, adapted_kl_coef
from strop.algorithms.variants import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from strop.config import AlgorithmOptions, PPOClipOptions
from strop.config.advantage import NEEDS_CRITIC, PER_TOKEN, TAKES_TOKEN_REWARDS
from strop.types import Metric, RewardError, StepMetrics


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
    selected: Tensor | None = None  # what the policy loss singles out, decided over the whole step
    likelihood: Tensor | None = None  # what weighs -logprobs beside the policy loss, decided over the whole step
    is_fresh: Tensor | None = None  # bool, sampled by the policy as it was before the batch; None: all were
    measures_gap: bool = True  # False where the policy has moved since the trainer could be compared with the sampler

    @property
    def loss_mask(self) -> Tensor:
        """All True: these are the trainable ones."""
        return torch.ones_like(self.advantages, dtype=torch.bool)


@dataclass(frozen=True)
class ScoredTokens:
    """What advantages are computed from: S scored rollouts and their T tokens."""

    rewards: Tensor  # S
    group_ids: Tensor  # S
    lengths: Tensor  # S, trainable tokens
    loss_mask: Tensor  # T
    sequence_ids: Tensor  # T, entry s of the rollouts
    reward_parts: Tensor | None = None  # S x K, several rewards kept apart
    part_weights: Tensor | None = None  # K; None: 1 each
    token_rewards: Tensor | None = None  # T, what each token earns, all of `rewards`; None: the last token earns it
    step_mask: Tensor | None = None  # T, where a token was given a reward, if only 0; None: at the last token
    old_logprobs: Tensor | None = None  # T
    ref_logprobs: Tensor | None = None  # T
    token_kl: Tensor | None = None  # T, filled in by the objective
    values: Tensor | None = None  # T, of the critic before the batch's first update
    rollout_ids: Tensor | None = None


class Objective(Protocol):
    """What a trainer needs to know of an objective."""

    uses_reference: bool
    uses_entropy: bool  # in the loss, with gradient
    measures_entropy: bool  # wants it at least as a metric; where neither, the trainer does not compute it
    temperature: float

    def loss(self, tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]: ...


class PolicyObjective:
    """Policy loss + KL to the reference - entropy bonus, as the options of `[algorithm]` say."""

    measures_entropy = True

    def __init__(self, options: AlgorithmOptions, *, temperature: float, max_response_tokens: int) -> None:
        self.options = options
        self.temperature = temperature
        self.max_response_tokens = max_response_tokens
        self.uses_reference = options.kl.coef > 0
        self.uses_entropy = options.entropy_coef != 0 or options.entropy_target is not None
        self.kl_coef, self.entropy_coef = options.kl.coef, options.entropy_coef
        self._kl_in_reward: StepMetrics = {}  # of the batch at hand
        self._policy_loss = POLICY_LOSSES[options.policy_loss.kind]

    def __getstate__(self) -> dict[str, Any]:
        """As another process can have it: the loss goes by its name."""
        return {name: value for name, value in vars(self).items() if name != "_policy_loss"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _policy_loss=POLICY_LOSSES[state["options"].policy_loss.kind])

    @property
    def needs_old_logprobs(self) -> bool:
        """True if log-probabilities from before the batch's first update are needed, by a pass of their own."""
        return self.options.updates_per_batch > 1 or self.needs_old_logprobs_of_all

    @property
    def needs_old_logprobs_of_all(self) -> bool:
        """True if something beside the ratio takes them. The ratio of a batch's first update divides by its own: that update's
        part needs none."""
        options = self.options
        kl_in_reward = self.uses_reference and options.kl.place == "reward"
        return self._policy_loss.select is not None or kl_in_reward

    def advantages(self, scored: ScoredTokens) -> Tensor:
        """Advantages [T], from all scored rollouts of the batch at once.

        Raises:
            RewardError: rewards that the advantage cannot take.
        """
        return self.advantages_and_returns(scored)[0]

    def advantages_and_returns(self, scored: ScoredTokens) -> tuple[Tensor, Tensor | None]:
        """Advantages [T], and returns [T] for the critic to learn, None without one; raises as `advantages`."""
        options = self.options
        assert options.advantage.kind != "gdpo" or scored.reward_parts is not None
        self._refuse_uneven_sequences(scored)
        penalty = torch.zeros(scored.loss_mask.shape)
        if self.uses_reference and options.kl.place == "reward":
            assert scored.old_logprobs is not None
            assert scored.ref_logprobs is not None
            mask = scored.loss_mask
            estimate = ops.kl_estimate(scored.old_logprobs[mask], scored.ref_logprobs[mask], kind=options.kl.kind)
            penalty[mask] = self.kl_coef * estimate
            self._kl_in_reward = {f"kl_ref_{options.kl.kind}": Metric.mean(float(estimate.sum()), estimate.numel())}
        scored = _earned(scored, penalty)
        if options.advantage.kind in NEEDS_CRITIC:
            return ADVANTAGES[options.advantage.kind](options.advantage, scored)
        try:
            found = ADVANTAGES[options.advantage.kind](options.advantage, scored)
        except ValueError as error:  # rewards that this advantage cannot take
            raise RewardError(f"algorithm.advantage.kind = {options.advantage.kind}: {error}") from error
        if options.advantage.kind not in PER_TOKEN:  # one number per rollout
            found = found[scored.sequence_ids]
        return ops.whiten(found, scored.loss_mask) if options.whiten_advantages else found, None

    def _refuse_uneven_sequences(self, scored: ScoredTokens) -> None:
        """A loss with one advantage per sequence cannot take rewards that its tokens earn one by one. Only the scorer shows
        whether it gives such; the options that do so are refused with the config."""
        options = self.options
        takes_them = options.advantage.kind in TAKES_TOKEN_REWARDS
        if scored.step_mask is not None and takes_them and options.policy_loss.needs_one_advantage:
            raise RewardError(
                f"algorithm.policy_loss.kind must not be {options.policy_loss.kind} with rewards per token or turn under "
                f"algorithm.advantage.kind = {options.advantage.kind}: it is a loss of whole sequences, with one advantage "
                "each. Use gspo_token or a loss of tokens, such as ppo_clip."
            )

    def step_tensors(
        self,
        *,
        loss_mask: Tensor,
        sequence_ids: Tensor,
        group_ids: Tensor,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        is_right: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """What belongs to one whole optimizer step, computed before it is cut: token weights, what the likelihood of right
        answers counts beside them, and selected tokens, [T]."""
        reduction = self.options.reduction
        weights = ops.token_weights(
            loss_mask,
            sequence_ids,
            reduction=reduction,
            group_ids=group_ids if reduction == "prompt_mean" else None,
            max_response_tokens=self.max_response_tokens if reduction == "constant_length" else None,
        )
        found = {"token_weights": weights}
        if is_right is not None:
            found["likelihood"] = self.options.likelihood_coef * _over_weights(is_right & loss_mask, weights)
        if self._policy_loss.select is None:
            return found
        assert old_logprobs is not None, "needs_old_logprobs is set"
        whole = _Step(old_logprobs, advantages, loss_mask)
        return found | {"selected": self._policy_loss.selected(self.options.policy_loss, whole)}

    def loss(self, tokens: TrainableTokens) -> tuple[Tensor, StepMetrics]:
        """Unreduced loss [N] and the metrics of these tokens."""
        options = self.options
        policy = self._policy_loss(options.policy_loss, tokens)
        loss, sums = policy.loss, {"clip_fraction": policy.clipped}
        if isinstance(options.policy_loss, PPOClipOptions) and options.policy_loss.eps_clip_c is not None:
            arguments = (tokens.logprobs, tokens.old_logprobs, tokens.advantages)
            sums["dual_clip_fraction"] = ops.dual_clipped(*arguments, eps_clip_c=options.policy_loss.eps_clip_c)
        for name, weight in self._corrections(tokens).items():
            loss = torch.where(weight == 0, torch.zeros_like(loss), loss * weight)
            sums[f"{name}_weight"], sums[f"{name}_rejected"] = weight, weight == 0
        if self.uses_reference and options.kl.place == "loss":
            assert tokens.ref_logprobs is not None, "the trainer computes them because uses_reference is set"
            old = tokens.old_logprobs if options.kl.unbiased else None
            kl = ops.kl_estimate(tokens.logprobs, tokens.ref_logprobs, old, kind=options.kl.kind)
            loss = loss + self.kl_coef * kl
            sums[f"kl_ref_{options.kl.kind}"] = kl
        if self.uses_entropy:
            assert tokens.entropy is not None, "the trainer computes it because uses_entropy is set"
            loss = loss - self.entropy_coef * tokens.entropy
        if tokens.likelihood is not None:
            loss = loss - tokens.likelihood.to(loss.dtype) * tokens.logprobs
        if tokens.entropy is not None:
            sums["entropy"] = tokens.entropy
        if tokens.measures_gap and (tokens.is_fresh is None or bool(tokens.is_fresh.any())):
            trainer = tokens.logprobs if options.old_logprobs == "rollout" else tokens.old_logprobs
            gap = (trainer - tokens.rollout_logprobs).abs()
            sums["logprob_gap"] = gap if tokens.is_fresh is None else gap.where(tokens.is_fresh, 0.0)
        return loss, _metrics(tokens, sums)

    def _corrections(self, tokens: TrainableTokens) -> dict[str, Tensor]:
        """Weights for the gap between sampler and trainer, and for sequences that have gone too far."""
        options, weights = self.options, {}
        if options.correction.kind != "none":
            weights["correction"] = CORRECTIONS[options.correction.kind](options.correction, tokens)
        place = (tokens.loss_mask, tokens.sequence_ids)
        if options.veto_ratio is not None:
            gap = (tokens.old_logprobs, tokens.rollout_logprobs, *place)
            weights["veto"] = ops.veto(*gap, min_token_ratio=options.veto_ratio)
        if options.opsm_delta is not None:
            moved = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, *place)
            weights["opsm"] = ops.opsm(*moved, opsm_delta=options.opsm_delta)
        return weights

    def adapt(self, metrics: StepMetrics, *, follows: bool = True) -> StepMetrics:
        """Move adaptive coefficients after a batch; returns their values, and what only the rewards showed, as metrics. In a
        batch that the policy did not learn from they do not follow."""
        options, found = self.options, dict(self._kl_in_reward)
        if not follows:
            return found
        metrics = metrics | found
        name = f"kl_ref_{options.kl.kind}"
        if options.kl.target is not None and name in metrics:
            self.kl_coef = adapted_kl_coef(
                self.kl_coef, metrics[name].value, target=options.kl.target, horizon_steps=options.kl.horizon_steps
            )
            found["kl_coef"] = Metric("max", self.kl_coef)
        if options.entropy_target is not None and "entropy" in metrics:
            self.entropy_coef = adapted_entropy_coef(
                self.entropy_coef, metrics["entropy"].value, target=options.entropy_target, step=options.entropy_step
            )
            found["entropy_coef"] = Metric("max", self.entropy_coef)
        return found

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take back what `state` gave; what is not in it stays as it is."""
        self.kl_coef = float(state.get("kl_coef", self.kl_coef))
        self.entropy_coef = float(state.get("entropy_coef", self.entropy_coef))


def _earned(scored: ScoredTokens, token_kl: Tensor) -> ScoredTokens:
    """The same with what each token earns: the rewards given to it, all of the rollout's on its last token where none has
    a place of its own, less the KL penalty."""
    earned, steps, mask = scored.token_rewards, scored.step_mask, scored.loss_mask
    if earned is None:
        earned = ops.last_token_rewards(scored.rewards, mask, scored.sequence_ids)
    if steps is None:
        steps = ops.last_token_rewards(torch.ones_like(scored.rewards), mask, scored.sequence_ids) > 0
    # what stands in masked slots is not used, whatever it is
    penalized = torch.where(mask, earned - token_kl.double(), torch.zeros_like(earned))
    return replace(scored, token_rewards=penalized, step_mask=steps, token_kl=token_kl)


def _over_weights(chosen: Tensor, weights: Tensor) -> Tensor:
    """1 / (number of chosen tokens) at each of them, divided by its token weight: the trainer sums weight x loss."""
    share = chosen.double() / chosen.sum().clamp(min=1)
    divisor = torch.where(chosen, weights, torch.ones_like(weights))  # masked tokens weigh 0
    return torch.where(chosen, share / divisor, torch.zeros_like(weights))


@dataclass(frozen=True)
class _Step:
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor


def _metrics(tokens: TrainableTokens, sums: dict[str, Tensor]) -> StepMetrics:
    """Sums and extremes of one micro-batch, moved to the host in one transfer."""
    with torch.no_grad():
        log_ratio = (tokens.logprobs - tokens.old_logprobs).clamp(-ops.MAX_LOG_RATIO, ops.MAX_LOG_RATIO)
        # The tokens are samples of the old policy: over them, this is an unbiased estimate of KL(old || policy).
        means = {**sums, "kl_old_policy_k3": ops.kl_estimate(tokens.old_logprobs, tokens.logprobs, kind="k3")}
        extremes = {"ratio_max": log_ratio.max().exp(), "ratio_min": log_ratio.min().exp()}
        if "logprob_gap" in sums:
            extremes["logprob_gap_max"] = sums["logprob_gap"].max()
        numbers = torch.stack(
            [t.float().sum() for t in means.values()] + [t.float() for t in extremes.values()]
        ).tolist()
    count = tokens.logprobs.numel()
    counts = {} if tokens.is_fresh is None else {"logprob_gap": int(tokens.is_fresh.sum())}
    metrics = {
        name: Metric.mean(value, counts.get(name, count))
        for name, value in zip(means, numbers[: len(means)], strict=True)
    }
    for name, value in zip(extremes, numbers[len(means) :], strict=True):
        metrics[name] = Metric("min" if name == "ratio_min" else "max", value)
    if tokens.likelihood is not None:
        right = -tokens.logprobs.detach()[tokens.likelihood > 0]
        metrics["likelihood_loss"] = Metric.mean(float(right.sum()), right.numel())
    return metrics
