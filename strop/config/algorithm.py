"""Options of the objective: policy loss, advantages, KL, entropy, and how the loss is averaged.

The fields of a variant (all but `kind`) are exactly the keyword-only arguments of the function in `strop.ops` that it
is bound to; `strop.algorithms` refuses to import otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from strop.config.base import Idle, Options, Problem


class PPOClipOptions(Options):
    """PPO's clipped surrogate, with dual clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    eps_clip: float = Field(default=0.2, ge=0, lt=1, description="Distance of the ratio's lower bound from 1.")
    eps_clip_high: float | None = Field(
        default=None, ge=0, description="Distance of the ratio's upper bound from 1; none means eps_clip."
    )
    eps_clip_c: float | None = Field(
        default=None,
        gt=1,
        description="Dual clip: cap on the ratio where the advantage is negative; none means no cap.",
    )

    def problems(self) -> Iterator[Problem]:
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        if self.eps_clip_c is not None and self.eps_clip_c <= 1 + high:
            yield Problem(
                "eps_clip_c",
                f"must be above 1 + eps_clip_high = {1 + high:g}, got {self.eps_clip_c:g}. "
                "A cap inside the band would cut tokens that the band lets through.",
            )


class CISPOOptions(Options):
    """CISPO: the importance weight is clipped under a stop-gradient; every token keeps its gradient."""

    kind: Literal["cispo"] = "cispo"
    eps_clip: float = Field(
        default=1.0, ge=0, description="Distance of the weight's lower bound from 1; 1.0 means no lower bound."
    )
    eps_clip_high: float = Field(default=4.0, ge=0, description="Distance of the weight's upper bound from 1.")

    def warnings(self) -> Iterator[str]:
        if self.eps_clip < 1:
            yield (
                f"CISPO with eps_clip = {self.eps_clip:g} keeps a lower bound of {1 - self.eps_clip:g} on the weight. "
                "The canonical form has none: eps_clip = 1.0, eps_clip_high = 4.0."
            )


PolicyLossOptions = Annotated[PPOClipOptions | CISPOOptions, Field(discriminator="kind")]


class GroupAdvantageOptions(Options):
    """GRPO's advantage: distance from the group's mean reward."""

    kind: Literal["group"] = "group"
    normalize_std: bool = Field(default=True, description="Divide by the group's standard deviation (false: Dr.GRPO).")
    std_eps: float = Field(default=1e-6, gt=0, description="Added to the standard deviation, in units of reward.")

    def idle(self) -> Iterator[Idle]:
        if not self.normalize_std:
            yield Idle("std_eps", "is only used when normalize_std = true")


class KLOptions(Options):
    """Penalty for leaving the reference: the model as it was before the first step, frozen."""

    coef: float = Field(
        default=0.0, ge=0, description="Weight of KL(policy || reference) in the loss; 0 means no reference is kept."
    )
    kind: Literal["k1", "k2", "k3"] = Field(default="k3", description="Estimator of the KL; k3 is never negative.")

    def idle(self) -> Iterator[Idle]:
        if self.coef == 0:
            yield Idle("kind", "is only used when algorithm.kl.coef is above 0")

    def warnings(self) -> Iterator[str]:
        if self.coef > 0 and self.kind == "k1":
            yield (
                "algorithm.kl.kind = k1 in the loss: its expected gradient on fresh samples is 0, so it adds noise and no pull "
                "to the reference. Use k2 or k3."
            )


class AlgorithmOptions(Options):
    """What is optimised."""

    preset: Literal["grpo", "dr_grpo", "cispo"] | None = Field(
        default=None, description="A paper's settings for the tables below; what you set beside it wins."
    )
    policy_loss: PolicyLossOptions = PPOClipOptions()
    advantage: GroupAdvantageOptions = GroupAdvantageOptions()
    kl: KLOptions = KLOptions()
    entropy_coef: float = Field(
        default=0.0, description="Weight of the entropy bonus, subtracted from the loss; 0 means none."
    )
    reduction: Literal["token_mean", "sequence_mean", "prompt_mean", "constant_length"] = Field(
        default="token_mean",
        description="How the loss of a step is averaged; constant_length divides by rollout.max_response_tokens.",
    )
    mask_truncated: bool = Field(
        default=False, description="Leave responses that hit the length limit out of the loss."
    )
    updates_per_batch: int = Field(
        default=1, ge=1, description="Optimizer steps made from one batch of rollouts, each on a part of its prompts."
    )

    def idle(self) -> Iterator[Idle]:
        if self.updates_per_batch == 1:
            for name in ("eps_clip", "eps_clip_high", "eps_clip_c"):
                if name in type(self.policy_loss).model_fields:
                    yield Idle(
                        f"policy_loss.{name}",
                        "cannot act with algorithm.updates_per_batch = 1: every ratio is exactly 1 in the only update. "
                        "Set updates_per_batch to 2 or more",
                    )
