"""The vocabulary that every room shares: prompts, rollouts, groups, and the protocols of engines and trainers.

Plain frozen dataclasses, standard library only. All sequences of token ids are tuples of int; entry t of any
per-token field belongs to token t, which is predicted from the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
GuardName = Literal["non_finite", "logprob_gap", "loss_jump", "kl_jump"]


class StropError(Exception):
    """Root of every error that strop raises on purpose."""


class UserError(StropError, ValueError):
    """Something a user can mend: an option, a file, a folder. The commands print it without a traceback, exit code 2."""


class ConfigError(UserError):
    """One or more options are wrong; every problem found is in the message."""


class DataError(UserError):
    """A data file is broken; the message names file, physical line and reason."""


class ModelError(UserError):
    """A model folder cannot be used as it is."""


class RewardError(UserError):
    """A scorer failed or returned something that is not a score."""


class FilterError(UserError):
    """A filter failed, or it lets too little through."""


def model_failure(error: Exception, model: Any, rows: str, *, option: str = "") -> ModelError:
    """What a model's own code raised, in one sentence: too little memory, or an input that it cannot read.

    Args:
        error: from the model's forward or backward pass; another library raises whatever it likes.
        model: the model.
        rows: what it was given, in words.
        option: which option to lower where memory is short.
    """
    first_line = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
        lower = f"lower {option}, or " if option else ""
        return ModelError(f"{rows} would not fit memory: {lower}use a smaller model ({first_line}).")
    return ModelError(f"{type(model).__name__} cannot read {rows}: {type(error).__name__}: {first_line}")


class GuardError(StropError):
    """A guard stopped the step before the optimizer: the message names what was out of bounds.

    Args:
        guard: which one, where `[guards]` has an action for it.
        blamed: the sequences that it comes from, by name, where that is known.
    """

    def __init__(self, message: str, *, guard: GuardName | None = None, blamed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.guard, self.blamed = guard, tuple(blamed)


class WaitError(StropError):
    """A wait came to its limit: the message names what was waited for."""


class LostRankError(WaitError):
    """A process of the trainer has ended, or does not answer; the step was not made."""


class EngineError(StropError):
    """An engine gave something else than what it was asked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task, ready to be sampled from.

    >>> Prompt(row=0, tokens=(5, 6, 7), text="2+3=", label="5").label
    '5'
    """

    row: int  # its place in the data source, counted from 0
    tokens: tuple[int, ...]
    text: str  # as the model reads it, after the chat template
    label: Any = None  # what a scorer compares with
    source: str | None = None  # where it comes from, by a name of the data's own
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """What a scorer returns to reward tokens: one number for each token that the policy wrote, in their order; None for a
    token that is given no reward, which is not the same as 0 where rewards are averaged.

    >>> TokenRewards((None, 0.5, None, 1.0)).values
    (None, 0.5, None, 1.0)
    """

    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """What a scorer returns to reward turns: one number for each run of tokens that the policy wrote without a break, in
    their order; it lands on the turn's last token. None gives a turn no reward."""

    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled sequence: the prompt's tokens, then what came after.

    >>> prompt = Prompt(row=0, tokens=(5, 6), text="ab")
    >>> rollout = Rollout(prompt, group_id=0, sample=0, tokens=(5, 6, 9, 2), response_mask=(False, False, True, True),
    ...                   rollout_logprobs=(0.0, 0.0, -0.5, -0.1), policy_versions=(-1, -1, 3, 3), finish_reason="stop",
    ...                   text="c")
    >>> rollout.num_response_tokens
    2
    """

    prompt: Prompt
    group_id: int  # rollouts of one prompt in one step share it
    sample: int  # 0 .. group_size - 1 within the group
    tokens: tuple[int, ...]
    response_mask: tuple[bool, ...]  # True where the policy sampled the token
    rollout_logprobs: tuple[float, ...]  # at the sampling temperature; 0.0 where response_mask is False
    policy_versions: tuple[int, ...]  # of the weights that sampled the token; -1 where response_mask is False
    finish_reason: FinishReason
    text: str  # what the policy wrote, decoded without special tokens; what a scorer sees
    reward_parts: Mapping[str, float] | None = None  # several named rewards; `reward` is their sum, each by its weight
    token_rewards: tuple[float | None, ...] | None = None  # entry per token, None where none was given to it
    reward: float | None = None  # all of it; None: no score, the rollout leaves the statistics and the loss
    excluded: str | None = None  # why it leaves, one word for the metrics
    length_penalty: float | None = None  # 0 or less, part of `reward`; None: nothing was asked for its length

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_mask)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"sample {self.sample} of prompt row {self.prompt.row}"


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt in one step."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. temperature 0 is greedy; top_p 1 and top_k 0 leave the distribution as it is."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()  # end ids beside those of the model


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """n samples of one prompt; sample i draws from the random stream of seeds[i] alone, whatever else is in flight."""

    prompt_tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling

    @property
    def num_positions(self) -> int:
        """Tokens that the longest sample can have, prompt included."""
        return len(self.prompt_tokens) + self.sampling.max_response_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response: ids as they were sampled (the end token included) and their log-probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that can be merged over micro-batches and ranks without depending on how the step was cut.

    >>> (Metric.mean(6.0, 4) + Metric.mean(1.0, 1)).value
    1.4
    >>> (Metric("max", 2.0) + Metric("max", 3.0)).value
    3.0
    """

    kind: Literal["mean", "sum", "max", "min"]
    total: float
    count: float = 1.0

    @staticmethod
    def mean(total: float, count: float) -> Metric:
        return Metric("mean", total, count)

    def __add__(self, other: Metric) -> Metric:
        assert self.kind == other.kind, (self, other)
        if self.kind in ("max", "min"):
            return Metric(self.kind, (max if self.kind == "max" else min)(self.total, other.total))
        return Metric(self.kind, self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        if self.kind == "mean":
            return self.total / self.count if self.count else 0.0
        return self.total


StepMetrics = dict[str, Metric]


def merge_metrics(parts: Iterable[StepMetrics]) -> StepMetrics:
    """Merge metrics name by name."""
    merged: StepMetrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


class WeightSource(Protocol):
    """Named tensors under their Hugging Face names, produced one at a time, as often as they are asked for."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Engine(Protocol):
    """Samples: token ids in, token ids and log-probabilities out."""

    policy_version: int  # of the weights it holds

    async def generate(self, request: GenerateRequest) -> list[Completion]: ...

    async def logprobs(self, tokens: Sequence[int]) -> list[float]: ...

    async def update_weights(self, weights: WeightSource, policy_version: int) -> StepMetrics:
        """Sample from these weights from now on; what carrying them took, as metrics. Whole, or an error and not at all."""
        ...

    async def rest(self) -> None:
        """Nothing is asked for until the trainer has made a step: what the step could use may be given up until then."""
        ...

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Learns. `batch` is a `strop.data.Batch`, `objective` a `strop.algorithms.Objective`."""

    def logprobs(self, batch: Any, *, model: Literal["policy", "reference"]) -> Tensor: ...

    def step(self, batch: Any, objective: Any) -> StepMetrics: ...

    def weights(self) -> WeightSource: ...

    def snapshot(self) -> Callable[[Path], None]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...
