"""Options of sampling and scoring."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from strop.config.base import Options


class RolloutOptions(Options):
    """How a batch of rollouts is sampled. Training samples from the whole distribution: no top_p, no top_k."""

    prompts_per_step: int = Field(default=32, ge=1, le=100_000, description="Prompts in a batch of rollouts.")
    group_size: int = Field(default=8, ge=1, le=100_000, description="Samples per prompt.")
    temperature: float = Field(
        default=1.0,
        ge=1e-3,
        description="Sampling temperature; the trainer's log-probabilities use it too. Below 0.001 the rounding of float32 "
        "logits would decide.",
    )
    max_response_tokens: int = Field(
        default=256, ge=1, description="Length limit of a response in tokens, the end token included."
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="End ids beside those of the model."
    )


class _ForeignScorerOptions(Options):
    """Of scorers that strop does not write, which may fail; its own give every answer a score."""

    on_error: Literal["fail", "zero", "exclude"] = Field(
        default="fail",
        description="When a scorer raises or returns NaN: stop, score 0, or leave the rollout out (counted).",
    )


class ExactRewardOptions(Options):
    """1 if the response equals the label and ended by itself, else 0."""

    kind: Literal["exact"] = "exact"
    strip: bool = Field(default=True, description="Ignore white space around both.")


class NumberRewardOptions(Options):
    """1 if the last number of the response equals the label, else 0."""

    kind: Literal["number"] = "number"
    tolerance: float = Field(default=0.0, ge=0, description="Largest absolute difference that still counts as equal.")


class MathRewardOptions(Options):
    """1 if the response's final answer is mathematically equal to the label (math-verify), else 0."""

    kind: Literal["math"] = "math"


class DatasetRewardOptions(_ForeignScorerOptions):
    """The score of the dataset's own scorer (reasoning-gym)."""

    kind: Literal["dataset"] = "dataset"


class FunctionRewardOptions(_ForeignScorerOptions):
    """Your function: it takes a `strop.types.Rollout` and returns a number, or None for no score."""

    kind: Literal["function"] = "function"
    function: str = Field(description="Where it is: module:function or path/to/file.py:function.")
    batched: bool = Field(default=False, description="It takes a list of rollouts and returns as many scores.")


class SlimeRewardOptions(_ForeignScorerOptions):
    """A reward function of slime's, unchanged: it takes `args` and a sample; plain or async."""

    kind: Literal["slime"] = "slime"
    function: str = Field(description="Where it is: module:function or path/to/file.py:function.")
    batched: bool = Field(
        default=False, description="It takes all samples of a prompt and returns as many scores (--group-rm)."
    )
    reward_key: str | None = Field(
        default=None, description="Which value of a returned dict is the reward; none leaves a dict as named rewards."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="What the function finds as attributes of `args`.")


RewardOptions = Annotated[
    ExactRewardOptions
    | NumberRewardOptions
    | MathRewardOptions
    | DatasetRewardOptions
    | FunctionRewardOptions
    | SlimeRewardOptions,
    Field(discriminator="kind"),
]
