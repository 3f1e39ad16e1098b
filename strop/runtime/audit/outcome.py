"""What a small run left behind, and whether two runs did the same: which differences count is said here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROUNDING = 1e-5  # relative: float32 sums in another order differ by less
_OF_NOTHING = 1e-7  # losses and updates below this are zero with rounding
_OF_LOGPROBS = 1e-3  # in nats: log-probabilities follow the weights, whose rounding the steps of a run amplify

# Parts that change for many reasons count only for the options whose meaning they are.
_ONLY_FOR = {
    "metrics": ("source_key", "success_reward", "streaming"),
    "forward passes": (
        "max_sequences",
        "max_cache_tokens",
        "max_tokens_per_micro_batch",
        "layout",
        "activation_checkpointing",
        "max_tokens_in_flight",
        "num_processes",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "kind",
    ),
    "optimizer": ("distributed_optimizer",),
    "threads": ("num_threads",),
    "servers": (
        "kind",
        "addresses",
        "router",
        "num_servers",
        "python",
        "server_args",
        "engine_args",
        "pause_mode",
        "sleep",
        "transfer_folder",
        "transfer_changes_only",
    ),
}

# Options that say when a run gives up.
_MEAN_ERRORS = (
    "timeout_s",
    "request_timeout_s",
    "start_timeout_s",
    "process_timeout_s",
    "num_retries",
    "max_restarts",
    "max_rounds",
)


@dataclass(frozen=True)
class Outcome:
    """What a run did, each part by the name that the table of an audit shows. `error`: what ended it; `is_guard`: that was
    a guard of the run, not something for a user to mend."""

    losses: tuple[float, ...] = ()
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    others: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    is_guard: bool = False

    def can_be_changed(self, option: str) -> bool:
        """False where no value of an option that is no such choice could change this: an error that it does not mean."""
        return not self.error or self.is_guard or option in _MEAN_ERRORS

    def changes_to(self, other: Outcome, option: str, *, stops_by_choice: bool) -> dict[str, str]:
        """Part to how it changed, in words; nothing where the two runs did the same as far as this option counts.

        An error is no act: a value that is only checked moves nothing. It is one where a guard stopped the run, or where
        the option is a choice between stopping and going on (`stops_by_choice`).
        """
        if self.error or other.error:
            failed = other if other.error else self
            if option in _MEAN_ERRORS:
                return {"stops": "differs"} if self.error != other.error else {}
            counts = bool(self.error) != bool(other.error) and (stops_by_choice or failed.is_guard)
            word = "stops" if failed is other else "goes on"
            return {word: failed.error.partition(": ")[0] if failed.is_guard else "differs"} if counts else {}
        found = _numbers(self, other)
        for name in dict.fromkeys((*self.others, *other.others)):
            slack = _OF_LOGPROBS if name in ("samples", "evaluation") else 0.0
            is_meant = option in _ONLY_FOR.get(name, (option,))
            if is_meant and not same(self.others.get(name), other.others.get(name), slack):
                found[name] = "differs"
        return found


def _numbers(one: Outcome, other: Outcome) -> dict[str, str]:
    """Changes of losses and of what was learned, above rounding."""
    found = {}
    if len(one.losses) != len(other.losses):
        found["loss"] = f"{len(one.losses)} -> {len(other.losses)} steps"
    elif one.losses:
        scale = max(map(abs, (*one.losses, *other.losses)))
        change = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
        if change > max(ROUNDING * scale, _OF_NOTHING):
            found["loss"] = f"{change:.2g}"
    if one.weights.shape != other.weights.shape:
        found["update"] = "no weights"
    else:
        change, scale = float((one.weights - other.weights).norm()), float(one.weights.norm())
        if change > max(ROUNDING * scale, _OF_NOTHING):
            found["update"] = f"{change / scale:.2g}" if scale > _OF_NOTHING else f"from 0 to {change:.2g}"
    return found


def same(one: Any, other: Any, slack: float = 0.0) -> bool:
    """Equal, numbers with a fraction up to rounding, and nan equal to nan.

    >>> same({"lr": 0.1}, {"lr": 0.1000000001}), same([1, 2], [1, 3]), same(float("nan"), float("nan"))
    (True, False, True)
    """
    if one == other:  # most are, to the bit
        return True
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return abs(one - other) <= max(ROUNDING * max(abs(one), abs(other)), slack)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name], slack) for name in one)
    if _is_list(one) and _is_list(other):
        return len(one) == len(other) and all(same(a, b, slack) for a, b in zip(one, other, strict=True))
    return False


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
