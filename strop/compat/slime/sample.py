"""A rollout as slime's functions know it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from strop.types import Rollout


@dataclass
class SpecInfo:
    """Counts of speculative decoding, of which strop's engine does none: 0."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted tokens of those drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens of the response for each verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


@dataclass
class PrefixCacheInfo:
    """Counts of a cache of prompts, which strop's engine does not have: 0."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Tokens from the cache, of all of prompts."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def to_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


@dataclass
class Sample:
    """The fields of slime's Sample. Those of things that strop does not have, such as images, hold what they hold without."""

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: list[list[int]] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        """How a sample ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo
    PrefixCacheInfo: ClassVar[type[PrefixCacheInfo]] = PrefixCacheInfo
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def __getattr__(self, name: str) -> Any:
        """Only called for what is not there."""
        if name.startswith("__"):
            raise AttributeError(name)
        there = ", ".join(f.name for f in fields(self))
        raise AttributeError(f"sample.{name} is not there: strop's samples have {there}.")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "a sample is no list of samples: set reward.batched = true if the function takes all samples of a prompt"
        )

    def to_dict(self) -> dict[str, Any]:
        """All attributes by name, the status as its text."""
        parts = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return vars(self) | {"status": self.status.value} | parts

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """A sample from what `to_dict` gave; names that are no fields become attributes."""
        names = {f.name for f in fields(Sample)}
        known = {name: value for name, value in data.items() if name in names}
        known["status"] = Sample.Status(data["status"])
        known["spec_info"] = SpecInfo(**data.get("spec_info", {}))
        known["prefix_cache_info"] = PrefixCacheInfo(**data.get("prefix_cache_info", {}))
        sample = Sample(**known)
        vars(sample).update({name: value for name, value in data.items() if name not in names})
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or of several named ones that of args.reward_key."""
        return self.reward[args.reward_key] if args.reward_key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens that enter the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)


class SamplesOfAPrompt(list[Any]):
    """The samples of one prompt: a list, which says what to set where a function takes it for one sample."""

    def __getattr__(self, name: str) -> Any:
        """Only called for what a list has not."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"samples.{name} is not there, since samples are the list of a prompt's samples (reward.batched = true): set "
            "reward.batched = false if the function takes one sample"
        )


_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def sample_of(rollout: Rollout, index: int, sample_class: Any = Sample) -> Any:
    """A rollout as a sample: ids as they were sampled, per-token fields over the response alone.

    Args:
        rollout: what the policy did.
        index: its number.
        sample_class: the class, where slime is installed and a function compares with its own `Sample.Status`.
    """
    before = len(rollout.prompt.tokens)
    values = {
        "group_index": rollout.group_id,
        "index": index,
        "prompt": rollout.prompt.text,
        "tokens": list(rollout.tokens),
        "response": rollout.text,
        "response_length": len(rollout.tokens) - before,
        "label": rollout.prompt.label,
        "loss_mask": [int(is_sampled) for is_sampled in rollout.response_mask[before:]],
        "rollout_log_probs": list(rollout.rollout_logprobs[before:]),
        "weight_versions": [str(v) for v in dict.fromkeys(rollout.policy_versions[before:]) if v >= 0],
        "status": sample_class.Status(_STATUS[rollout.finish_reason]),
        "metadata": dict(rollout.prompt.metadata),
    }
    return sample_class(**values)
