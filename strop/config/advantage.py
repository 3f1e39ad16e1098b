"""Options of the advantage, one class per variant, bound as those of the policy loss are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from strop.config.base import Idle, Options


class GroupAdvantageOptions(Options):
    """GRPO's advantage: distance from the group's mean reward."""

    kind: Literal["group"] = "group"
    normalize_std: bool = Field(default=True, description="Divide by the group's standard deviation (false: Dr.GRPO).")
    std_eps: float = Field(default=1e-6, gt=0, description="Added to the standard deviation, in units of reward.")

    def idle(self) -> Iterator[Idle]:
        if not self.normalize_std:
            yield Idle("std_eps", "is only used when normalize_std = true")


class RLOOOptions(Options):
    """Leave-one-out: distance from the mean of the others of the group."""

    kind: Literal["rloo"] = "rloo"


class OPOOptions(Options):
    """OPO: the baseline weighs each reward by the length of its response."""

    kind: Literal["opo"] = "opo"


class MaxRLOptions(Options):
    """MaxRL: distance from the group's mean reward, in units of that mean."""

    kind: Literal["maxrl"] = "maxrl"
    mean_eps: float = Field(default=1e-6, gt=0, description="Added to the mean, in units of reward.")


class PassAtKOptions(Options):
    """Pass@k training: the advantage of a rollout within all sets of k of its group."""

    kind: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=2, ge=1, description="Size of a set; a set passes if one of its rollouts does.")
    success_reward: float = Field(default=1.0, description="The reward from which on a rollout has succeeded.")


class GDPOOptions(Options):
    """GDPO: each of several named rewards is normalised in its group before they are added."""

    kind: Literal["gdpo"] = "gdpo"
    std_eps: float = Field(default=1e-6, gt=0, description="Added to the standard deviation, in units of reward.")


class ProcessAdvantageOptions(Options):
    """GRPO with rewards per token or turn: each is normalised over its group, and counts for the tokens up to it."""

    kind: Literal["process"] = "process"
    normalize_std: bool = Field(default=True, description="Divide by the deviation of the group's step rewards.")
    std_eps: float = Field(default=1e-6, gt=0, description="Added to the standard deviation, in units of reward.")

    def idle(self) -> Iterator[Idle]:
        if not self.normalize_std:
            yield Idle("std_eps", "is only used when normalize_std = true")


class ReinforcePlusPlusOptions(Options):
    """REINFORCE++: discounted returns per token, whitened over the step."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token; 1 means none.")


class ReinforcePlusPlusBaselineOptions(Options):
    """REINFORCE++ with the group's mean as baseline, whitened over the step."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class GAEOptions(Options):
    """PPO's advantage: generalised advantage estimation with a critic, which [critic] describes."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token; 1 means none.")
    lam: float = Field(
        default=1.0, ge=0, le=1, description="Lambda of the advantages: 1 trusts what was earned, 0 the critic."
    )
    lam_value: float | None = Field(
        default=None, ge=0, le=1, description="Lambda of what the critic learns; none means that of the advantages."
    )
    length_adaptive_alpha: float | None = Field(
        default=None,
        gt=0,
        description="VAPO: lambda of the advantages is 1 - 1 / (alpha x response tokens), at least 0; none means lam.",
    )
    whiten: bool = Field(
        default=True, description="Bring the advantages to mean 0 and deviation 1 over the tokens of the batch."
    )

    def idle(self) -> Iterator[Idle]:
        if self.length_adaptive_alpha is not None:
            yield Idle("lam", "is only used when length_adaptive_alpha is none")


AdvantageOptions = Annotated[
    GroupAdvantageOptions
    | RLOOOptions
    | OPOOptions
    | MaxRLOptions
    | PassAtKOptions
    | GDPOOptions
    | ProcessAdvantageOptions
    | ReinforcePlusPlusOptions
    | ReinforcePlusPlusBaselineOptions
    | GAEOptions,
    Field(discriminator="kind"),
]

# Advantages that need other rollouts of the same prompt, and those that ask a critic.
NEEDS_GROUP = ("group", "rloo", "opo", "maxrl", "pass_at_k", "gdpo", "process", "reinforce_plus_plus_baseline")
NEEDS_CRITIC = ("gae",)
# Those that take a penalty per token, and those for which it matters which token earns a reward; the others add it up.
TAKES_TOKEN_KL = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
TAKES_TOKEN_REWARDS = ("process", "reinforce_plus_plus", "gae")
# Those that give each token an advantage of its own, not each rollout.
PER_TOKEN = ("process", *TAKES_TOKEN_KL)
