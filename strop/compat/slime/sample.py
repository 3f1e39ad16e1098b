"""A rollout as slime's functions know it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from strop.types import Rollout


@dataclass
class Sample:
    """The fields of slime's Sample that a reward function can read; one that is not here is an AttributeError."""

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False

    class Status(Enum):
        """How a sample ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None

    def __getattr__(self, name: str) -> Any:
        """Only called for what is not there."""
        there = ", ".join(f.name for f in fields(self))
        raise AttributeError(f"sample.{name} is not there: strop's samples have {there}.")

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or of several named ones that of args.reward_key."""
        return self.reward[args.reward_key] if args.reward_key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Response tokens that enter the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)


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
