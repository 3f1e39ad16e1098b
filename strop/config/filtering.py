"""Options of what happens between scoring and advantages: length penalties, filters, and a curriculum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from strop.config.base import Idle, Options


class NoLengthPenaltyOptions(Options):
    """Length costs nothing."""

    kind: Literal["none"] = "none"


class SoftOverlongOptions(Options):
    """DAPO's soft overlong punishment: 0 up to the buffer, then linearly down to -penalty_coef at the length limit."""

    kind: Literal["soft_overlong"] = "soft_overlong"
    buffer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Last tokens before rollout.max_response_tokens over which the penalty grows; none means a fifth of it.",
    )
    penalty_coef: float = Field(default=1.0, gt=0, description="Penalty at the length limit.")

    def buffer_of(self, max_response_tokens: int) -> int:
        """The buffer in tokens. A fifth is the paper's: 4096 of 20480."""
        return max(1, max_response_tokens // 5) if self.buffer_tokens is None else self.buffer_tokens


class PerTokenPenaltyOptions(Options):
    """A price for each token above a target length, as in L1 (LCPO) from one side."""

    kind: Literal["per_token"] = "per_token"
    target_tokens: int = Field(default=0, ge=0, description="Length that costs nothing.")
    penalty_coef: float = Field(default=1e-3, gt=0, description="Penalty of each token above the target.")


LengthPenaltyOptions = Annotated[
    NoLengthPenaltyOptions | SoftOverlongOptions | PerTokenPenaltyOptions, Field(discriminator="kind")
]


class FilterOptions(Options):
    """Which scored groups and rollouts are learned from. Sampling goes on until a step has its number of groups."""

    equal_rewards: bool = Field(
        default=False,
        description="Drop groups whose scored rollouts all have the same reward (DAPO's dynamic sampling).",
    )
    group: str | None = Field(
        default=None,
        description="A function that takes a `strop.types.Group` of scored rollouts and returns true to keep it: "
        "module:function or path/to/file.py:function.",
    )
    group_kind: Literal["function", "slime"] = Field(
        default="function", description="Whether filter.group takes a Group, or slime's `args` and samples."
    )
    group_args: dict[str, Any] = Field(
        default_factory=dict, description="What a filter of slime's finds as attributes of `args`."
    )
    rollout: str | None = Field(
        default=None,
        description="A function that takes a scored `strop.types.Rollout` and returns true to keep it; one that is dropped "
        "leaves the statistics of its group and the loss.",
    )
    max_rounds: int = Field(
        default=20, ge=1, description="Rounds of sampling after which a step that is not full stops the run."
    )
    surplus: Literal["drop", "keep"] = Field(
        default="drop",
        description="What becomes of groups beyond what a step needs: they are dropped, or wait for the next step.",
    )

    @property
    def drops_groups(self) -> bool:
        """Is there a filter through which a group may be lost?"""
        return self.equal_rewards or self.group is not None or self.rollout is not None

    def idle(self) -> Iterator[Idle]:
        if self.group is None:
            yield Idle("group_kind", "is only used when filter.group is set")
        if self.group is None or self.group_kind != "slime":
            yield Idle("group_args", 'is only used when filter.group is set and filter.group_kind = "slime"')
        if not self.drops_groups:
            for name in ("max_rounds", "surplus"):
                yield Idle(name, "is only used with a filter: without one the first round fills the step")


class NoCurriculumOptions(Options):
    """Prompts come in passes over the data, whatever they earn."""

    kind: Literal["none"] = "none"


class AccuracyCurriculumOptions(Options):
    """After a first pass, prompts whose observed mean reward is nearer to a target are likelier."""

    kind: Literal["accuracy"] = "accuracy"
    target_reward: float = Field(default=0.5, description="Mean reward of the likeliest prompts.")
    width: float = Field(
        default=0.25,
        ge=1e-6,
        description="A prompt this far from the target is e times less likely; larger is more even.",
    )
    rate: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Weight of the newest group in a prompt's mean reward; 1 forgets the others.",
    )


CurriculumOptions = Annotated[NoCurriculumOptions | AccuracyCurriculumOptions, Field(discriminator="kind")]
