"""Options of sampling and scoring."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from strop.config.base import Idle, Options, Problem


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
    prompts_per_round: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Prompts sampled at once, more than a step needs where filters drop some; none: prompts_per_step.",
    )
    max_tokens_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Prompt and max_response_tokens of all samples that are sampled at the same time, at most; none: no cap.",
    )

    timeout_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds without a finished prompt after which sampling is taken to be stuck, and the run stops.",
    )
    max_off_policy_steps: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Optimizer steps by which sampling may be ahead of training, which go on side by side; 0: they take turns, "
        "and every sample is of the newest weights.",
    )
    streaming: bool = Field(
        default=False,
        description="A step starts with the first groups that are complete, and samples in flight go on after a weight update: "
        "what is late joins the next step, or is dropped where it would be too old. false: each batch is sampled by the "
        "weights of one step, and trained in its turn.",
    )
    mask_older_tokens: bool = Field(
        default=False,
        description="Leave out of the loss those tokens of a response that older weights sampled than its last ones.",
    )
    num_scorers: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Actors of the cluster that --cluster names, among which the rollouts of a step are divided to be scored, "
        "each with the scorer and the workers that [reward] asks for; 0: the machine of rank 0 scores.",
    )
    from_folder: str | None = Field(
        default=None,
        description="Train on the rollouts that strop train or strop rollout wrote to this folder, in their order and with "
        "their rewards; nothing is sampled. none: sample.",
    )

    @property
    def round_size(self) -> int:
        """Prompts of one round of sampling."""
        return self.prompts_per_step if self.prompts_per_round is None else self.prompts_per_round

    def idle(self) -> Iterator[Idle]:
        if self.max_off_policy_steps == 0:
            yield Idle("streaming", "is only used when rollout.max_off_policy_steps is above 0")
        if not (self.streaming and self.max_off_policy_steps):
            yield Idle(
                "mask_older_tokens", "cannot act without rollout.streaming: all tokens of a response are of one age"
            )

    def problems(self) -> Iterator[Problem]:
        if self.round_size < self.prompts_per_step:
            yield Problem(
                "prompts_per_round",
                f"must be at least rollout.prompts_per_step, got {self.prompts_per_round} and {self.prompts_per_step}: a round "
                "samples at least what a step needs.",
            )
        least = self.group_size * (1 + self.max_response_tokens)
        if self.max_tokens_in_flight is not None and self.max_tokens_in_flight < least:
            yield Problem(
                "max_tokens_in_flight",
                f"must be at least {least}, got {self.max_tokens_in_flight}: the {self.group_size} samples of one prompt are "
                f"sampled together, and each may have rollout.max_response_tokens = {self.max_response_tokens} tokens after "
                "its prompt.",
            )


# Of scorers that strop does not write, which may fail; its own give every answer a score.
_OnError = Annotated[
    Literal["fail", "zero", "exclude"],
    Field(description="When a scorer raises or returns NaN: stop, score 0, or leave the rollout out (counted)."),
]


class _FunctionOptions(Options):
    """Of functions that users write: what they return, and how they are called."""

    batched: bool
    on_error: _OnError = "fail"
    per: Literal["response", "turn", "token"] = Field(
        default="response",
        description="What the numbers belong to: one for the response, or a list of one for each turn or token of the policy.",
    )
    weights: dict[str, Annotated[float, Strict()]] = Field(
        default_factory=dict,
        description="Weight of each named reward in their sum; none given: all 1. With gdpo, of each normalised reward.",
    )
    max_concurrent: int = Field(
        default=64, ge=1, description="How many calls of an async function run at once, in one worker."
    )
    num_workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Processes in which the function is called; 0: that of the run, where nothing stops a call. "
        "none: one per core up to 4, and one for an async or batched function.",
    )
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that a call may take before it is stopped; none: 60, and 600 for the call of a batched function.",
    )
    memory_limit_mb: int = Field(
        default=4096,
        ge=64,
        description="Megabytes that a worker may have on top of what it takes when the function is loaded (Linux).",
    )

    @property
    def call_timeout_s(self) -> float:
        """Seconds that a call may take."""
        return (600.0 if self.batched else 60.0) if self.timeout_s is None else self.timeout_s

    def problems(self) -> Iterator[Problem]:
        if self.weights and not any(self.weights.values()):
            yield Problem("weights", f"must not all be 0, got {self.weights}: every reward would be 0.")

    def idle(self) -> Iterator[Idle]:
        if self.num_workers == 0:
            for name in ("timeout_s", "memory_limit_mb"):
                yield Idle(
                    name, "cannot act with reward.num_workers = 0: nothing stops a call in the process of the run"
                )
        elif sys.platform != "linux":
            yield Idle("memory_limit_mb", "cannot act on this system: Linux alone holds such a limit")


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


class CodeRewardOptions(Options):
    """1 if the Python program in the response passes the tests of the label, else 0."""

    kind: Literal["code"] = "code"
    score: Literal["all", "fraction"] = Field(
        default="all", description="1 only where all tests are passed, or the share of them that is."
    )
    isolation: Literal["full", "limits"] = Field(
        default="full",
        description="full: programs reach none of your files and processes, and where the system cannot keep them from those "
        "the run does not begin; limits: they have the limits below alone, and no network where the system allows it.",
    )
    timeout_s: float = Field(default=10.0, ge=0.01, description="Seconds that each test may take.")
    memory_limit_mb: int = Field(
        default=512, ge=64, description="Megabytes of address space that each process of a program may have."
    )
    max_processes: int = Field(
        default=32, ge=1, description="Processes and threads that a program may have at the same time (Linux)."
    )
    file_limit_mb: int = Field(
        default=16,
        ge=1,
        description="Megabytes of each file that a program writes, and of what it prints; where the system allows it, of all "
        "files together.",
    )

    def idle(self) -> Iterator[Idle]:
        if sys.platform != "linux":
            yield Idle("max_processes", "cannot act on this system: strop counts processes on Linux alone")


class DatasetRewardOptions(Options):
    """The score of the dataset's own scorer (reasoning-gym)."""

    kind: Literal["dataset"] = "dataset"
    on_error: _OnError = "fail"


class FunctionRewardOptions(_FunctionOptions):
    """Your function: it takes a `strop.types.Rollout` and returns a number, several, or None for no score; plain or async."""

    kind: Literal["function"] = "function"
    function: str = Field(description="Where it is: module:function or path/to/file.py:function.")
    batched: bool = Field(default=False, description="It takes a list of rollouts and returns as many scores.")

    def idle(self) -> Iterator[Idle]:
        yield from super().idle()
        if self.batched:
            yield Idle("max_concurrent", "cannot act with reward.batched = true: the function is called once a step")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.batched and (self.num_workers or 0) > 1:
            yield Problem(
                "num_workers",
                f"must be 0 or 1 with reward.batched = true, got {self.num_workers}: the function is called once a step.",
            )


class SlimeRewardOptions(_FunctionOptions):
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

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if (self.num_workers or 0) > 1:
            yield Problem(
                "num_workers",
                f'must be 0 or 1 with reward.kind = "slime", got {self.num_workers}: such functions are async, and their calls '
                "share one event loop. reward.max_concurrent says how many run at once.",
            )


class NoRewardOptions(Options):
    """No reward: nothing is scored, and all that is learned comes from a teacher (distillation.alone = true)."""

    kind: Literal["none"] = "none"


RewardOptions = Annotated[
    ExactRewardOptions
    | NumberRewardOptions
    | MathRewardOptions
    | CodeRewardOptions
    | DatasetRewardOptions
    | FunctionRewardOptions
    | SlimeRewardOptions
    | NoRewardOptions,
    Field(discriminator="kind"),
]


def rewarded_per(reward: RewardOptions) -> Literal["response", "turn", "token"]:
    """What the numbers of a scorer belong to, as far as the options say."""
    return reward.per if isinstance(reward, FunctionRewardOptions | SlimeRewardOptions) else "response"


def named_weights(reward: RewardOptions) -> dict[str, float]:
    """Weights of named rewards; empty where each counts 1."""
    return reward.weights if isinstance(reward, FunctionRewardOptions | SlimeRewardOptions) else {}
