"""Options of the objective: policy loss, advantages, KL, entropy, corrections, and how the loss is averaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from strop.config.advantage import NEEDS_CRITIC, TAKES_TOKEN_KL, AdvantageOptions, GroupAdvantageOptions
from strop.config.base import Idle, Options, Problem, not_negligible
from strop.config.policy_loss import PolicyLossOptions, PPOClipOptions

Level = Literal["token", "sequence_sum", "sequence_mean"]


class KLOptions(Options):
    """Penalty for leaving the reference: the model as it was before the first step, frozen."""

    coef: float = Field(
        default=0.0, ge=0, description="Weight of KL(policy || reference); 0 means no reference is kept."
    )
    kind: Literal["k1", "k2", "k3"] = Field(default="k3", description="Estimator of the KL; k3 is never negative.")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="In the loss, with gradient, or taken from each token's reward."
    )
    unbiased: bool = Field(
        default=False,
        description="Weigh the estimate in the loss by the ratio, so that its gradient is that of the KL.",
    )
    target: float | None = Field(
        default=None,
        gt=0,
        description="Adapt coef so that the KL per token stays near this, in nats; none means coef is fixed.",
    )
    horizon_steps: int = Field(
        default=1000, ge=1, description="Batches over which an adaptive coef follows; larger is slower."
    )
    refresh_steps: int = Field(
        default=0, ge=0, description="Make the policy the reference after every so many batches; 0: never."
    )

    def problems(self) -> Iterator[Problem]:
        yield from not_negligible("coef", self.coef)
        if self.coef > 0 and self.kind == "k1" and self.place == "loss" and not self.unbiased:
            yield Problem(
                "kind",
                "must not be k1 in the loss, got k1: its expected gradient on fresh samples is 0, so it would add noise and no "
                "pull to the reference. Use k2 or k3, or set algorithm.kl.unbiased = true.",
            )
        if self.unbiased and self.place == "reward":
            yield Problem(
                "unbiased", "must be false with algorithm.kl.place = reward, got true: a reward has no gradient."
            )

    def idle(self) -> Iterator[Idle]:
        if self.coef == 0:
            for name in ("kind", "place", "unbiased", "target", "refresh_steps"):
                yield Idle(name, "is only used when algorithm.kl.coef is above 0")
        if self.target is None or self.coef == 0:
            yield Idle("horizon_steps", "is only used when algorithm.kl.coef is above 0 and algorithm.kl.target is set")


class NoCorrectionOptions(Options):
    """Sampler and trainer are taken for the same policy."""

    kind: Literal["none"] = "none"


class _RatioRangeOptions(Options):
    """What corrections by a range of ratios share."""

    level: Level = Field(
        default="token", description="Ratio of a token, or of its sequence as product or geometric mean."
    )
    min_ratio: float
    max_ratio: float

    def problems(self) -> Iterator[Problem]:
        if self.min_ratio > self.max_ratio:
            yield Problem("min_ratio", f"must be at most max_ratio, got {self.min_ratio:g} and {self.max_ratio:g}.")


class TruncateOptions(_RatioRangeOptions):
    """TIS: the loss is weighed by the ratio of trainer to sampler, held in a range."""

    kind: Literal["truncate"] = "truncate"
    min_ratio: float = Field(default=0.0, ge=0, description="Smallest weight.")
    max_ratio: float = Field(default=2.0, gt=0, description="Largest weight.")


class MaskOptions(_RatioRangeOptions):
    """IcePop: the loss is weighed by the ratio of trainer to sampler, 0 outside a range."""

    kind: Literal["mask"] = "mask"
    min_ratio: float = Field(default=0.5, ge=0, description="Smallest ratio that is kept.")
    max_ratio: float = Field(default=5.0, gt=0, description="Largest ratio that is kept.")


CorrectionOptions = Annotated[NoCorrectionOptions | TruncateOptions | MaskOptions, Field(discriminator="kind")]


class AlgorithmOptions(Options):
    """What is optimised."""

    preset: (
        Literal[
            "grpo",
            "dr_grpo",
            "dapo",
            "cispo",
            "gspo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "sapo",
            "gmpo",
            "topr",
            "ppo",
            "vapo",
        ]
        | None
    ) = Field(default=None, description="A paper's settings for the tables below; what you set beside it wins.")
    policy_loss: PolicyLossOptions = PPOClipOptions()
    advantage: AdvantageOptions = GroupAdvantageOptions()
    kl: KLOptions = KLOptions()
    correction: CorrectionOptions = NoCorrectionOptions()
    veto_ratio: float | None = Field(
        default=None,
        ge=1e-8,
        lt=1,
        description="Leave out sequences in which one token's trainer-to-sampler ratio is below; none: never.",
    )
    opsm_delta: float | None = Field(
        default=None,
        gt=0,
        description="Leave out bad sequences whose mean log-probability fell by more, in nats; none: never.",
    )
    old_logprobs: Literal["trainer", "rollout"] = Field(
        default="trainer",
        description="What the ratio divides by: the trainer's own log-probabilities, or the sampler's.",
    )
    entropy_coef: float = Field(
        default=0.0, description="Weight of the entropy bonus, subtracted from the loss; 0: none."
    )
    entropy_target: float | None = Field(
        default=None,
        gt=0,
        description="Raise the entropy's weight while entropy is below this, in nats, else lower it; none: fixed.",
    )
    likelihood_coef: float = Field(
        default=0.0,
        ge=0,
        description="VAPO: weight of the likelihood loss, -(mean of logprobs over the tokens of right answers); 0 means none.",
    )
    likelihood_reward: float = Field(
        default=1.0, description="The scorer's reward from which on an answer is right for the likelihood loss."
    )
    entropy_step: float = Field(
        default=0.005, ge=1e-12, description="By how much the entropy's weight changes per batch."
    )
    reduction: Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"] = Field(
        default="token_mean",
        description="How the loss of a step is averaged; constant_length divides by rollout.max_response_tokens.",
    )
    whiten_advantages: bool = Field(
        default=False, description="Bring advantages to mean 0 and deviation 1 over the tokens of the batch."
    )
    mask_truncated: bool = Field(
        default=False, description="Leave responses that hit the length limit out of the loss."
    )
    updates_per_batch: int = Field(
        default=1, ge=1, description="Optimizer steps made from one batch of rollouts, each on a part of its prompts."
    )

    @property
    def advantages_vary(self) -> str | None:
        """The option through which tokens of one sequence can have different advantages; None where they cannot."""
        if self.advantage.kind in (*NEEDS_CRITIC, "process"):
            return f"algorithm.advantage.kind = {self.advantage.kind}"
        if self.advantage.kind == "reinforce_plus_plus" and self.advantage.gamma < 1:
            return f"algorithm.advantage.gamma = {self.advantage.gamma:g}"
        return "algorithm.kl.place = reward" if self.kl.coef > 0 and self.kl.place == "reward" else None

    @property
    def ratio_moves(self) -> bool:
        """False where every ratio of policy to old policy is exactly 1."""
        return self.updates_per_batch > 1 or self.old_logprobs == "rollout"

    @property
    def uses_old_logprobs(self) -> bool:
        """True if a term of the objective looks at the log-probabilities from before the batch's updates."""
        kl_in_reward = self.kl.coef > 0 and self.kl.place == "reward"
        return self.policy_loss.has_ratio or self.opsm_delta is not None or self.kl.unbiased or kl_in_reward

    def problems(self) -> Iterator[Problem]:
        yield from not_negligible("entropy_coef", self.entropy_coef)
        if self.old_logprobs == "rollout":
            for name, value in (("correction.kind", self.correction.kind), ("veto_ratio", self.veto_ratio)):
                if value not in ("none", None):
                    yield Problem(
                        name,
                        f"must be none with algorithm.old_logprobs = rollout, got {value}: the ratio holds the gap already.",
                    )
        if self.kl.coef > 0 and self.kl.place == "reward" and self.advantage.kind not in TAKES_TOKEN_KL:
            yield Problem(
                "kl.place",
                f"must be loss with algorithm.advantage.kind = {self.advantage.kind}, got reward: only "
                f"{', '.join(TAKES_TOKEN_KL[:-1])} and {TAKES_TOKEN_KL[-1]} take a penalty per token.",
            )
        if self.kl.coef > 0 and self.kl.refresh_steps == 1 and (self.kl.place == "reward" or not self.ratio_moves):
            yield Problem(
                "kl.refresh_steps",
                "must be 2 or more, or 0, got 1: the reference would be the very policy that sampled, and the penalty 0"
                + (" without gradient." if self.kl.place == "loss" else "."),
            )
        if self.policy_loss.needs_one_advantage and self.advantages_vary:
            kind = self.policy_loss.kind
            yield Problem(
                "policy_loss.kind",
                f"must not be {kind} with {self.advantages_vary}, got {kind}: it is a loss of whole sequences, with one "
                "advantage each, and here advantages differ within a sequence. Use gspo_token or a loss of tokens, such as "
                "ppo_clip.",
            )
        if self.entropy_target is not None and self.entropy_coef < 0:
            yield Problem(
                "entropy_coef",
                f"must be >= 0 with algorithm.entropy_target, got {self.entropy_coef:g}: the weight that follows the target "
                "is never below 0.",
            )
        if self.whiten_advantages and self.advantage.kind in (*TAKES_TOKEN_KL, "gdpo"):
            words = "has algorithm.advantage.whiten for it" if self.advantage.kind == "gae" else "whitens already"
            yield Problem("whiten_advantages", f"must be false, got true: {self.advantage.kind} {words}.")

    def idle(self) -> Iterator[Idle]:
        if self.likelihood_coef == 0:
            yield Idle("likelihood_reward", "is only used when algorithm.likelihood_coef is above 0")
        if self.entropy_target is None:
            yield Idle("entropy_step", "is only used when algorithm.entropy_target is set")
        if not self.ratio_moves:
            for name in self.policy_loss.idle_at_ratio_1():
                yield Idle(
                    f"policy_loss.{name}",
                    "cannot act with algorithm.updates_per_batch = 1: every ratio is exactly 1 in the only update. "
                    "Set updates_per_batch to 2 or more",
                )
            yield Idle(
                "opsm_delta", "cannot act with algorithm.updates_per_batch = 1: no log-probability has moved yet"
            )
