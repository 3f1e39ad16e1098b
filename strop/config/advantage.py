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


class ReinforcePlusPlusOptions(Options):
    """REINFORCE++: discounted returns per token, whitened over the step."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token; 1 means none.")


class ReinforcePlusPlusBaselineOptions(Options):
    """REINFORCE++ with the group's mean as baseline, whitened over the step."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


AdvantageOptions = Annotated[
    GroupAdvantageOptions
    | RLOOOptions
    | OPOOptions
    | MaxRLOptions
    | PassAtKOptions
    | GDPOOptions
    | ReinforcePlusPlusOptions
    | ReinforcePlusPlusBaselineOptions,
    Field(discriminator="kind"),
]

# Advantages that need other rollouts of the same prompt, and those that take a penalty per token.
NEEDS_GROUP = ("group", "rloo", "opo", "maxrl", "pass_at_k", "gdpo", "reinforce_plus_plus_baseline")
TAKES_TOKEN_KL = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
