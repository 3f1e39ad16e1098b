"""Options of evaluation: sets of held-out prompts, how they are answered, and which step was the best."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from strop.config.base import Derived, Idle, Options, Problem
from strop.config.data import DataOptions
from strop.config.sampling import RewardOptions

OF_A_SET = ("greedy", "num_samples", "temperature", "top_p", "top_k", "max_response_tokens")
_OF_SAMPLES = ("temperature", "top_p", "top_k")
_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


class EvalSetOptions(Options):
    """A set of held-out prompts under a name of yours. What it leaves out is as [eval] and [reward] say."""

    data: DataOptions
    reward: RewardOptions | None = Field(default=None, description="How its answers are scored; none means [reward].")
    greedy: bool | None = Field(
        default=None, description="Score the greedy answer to each prompt; none means as [eval]."
    )
    num_samples: int | None = Field(
        default=None, ge=0, description="Sampled answers to each prompt; 0 means none, none means as [eval]."
    )
    temperature: float | None = Field(
        default=None, ge=1e-3, description="Temperature of the sampled answers; none means as [eval]."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Keep the likeliest tokens up to this probability; 1 keeps all, none means as [eval].",
    )
    top_k: int | None = Field(
        default=None, ge=0, description="Keep so many likeliest tokens; 0 keeps all, none means as [eval]."
    )
    max_response_tokens: int | None = Field(default=None, ge=1, description="Length limit; none means as [eval].")


class EvalOptions(Options):
    """Held-out prompts, answered greedily and by sampling, before the first step, every so often, and after the last."""

    data: DataOptions | None = Field(
        default=None, description="The held-out prompts; none means no evaluation but that of eval.sets."
    )
    sets: dict[str, EvalSetOptions] = Field(default_factory=dict)
    at_start: bool = Field(default=True, description="Evaluate before the first step too.")
    every_steps: int = Field(
        default=0, ge=0, description="Evaluate after every so many steps; 0 means only before and after."
    )
    greedy: bool = Field(default=True, description="Score the greedy answer to each prompt.")
    num_samples: int = Field(default=1, ge=0, description="Sampled answers to each prompt; 0 means none.")
    temperature: float = Field(default=1.0, ge=1e-3, description="Temperature of the sampled answers.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Keep the likeliest tokens up to this probability; 1 keeps all."
    )
    top_k: int = Field(default=0, ge=0, description="Keep so many likeliest tokens; 0 keeps all.")
    max_response_tokens: int | None = Field(
        default=None, ge=1, description="Length limit; none means rollout.max_response_tokens."
    )
    success_reward: float = Field(
        default=1.0, description="A sampled answer that earns at least so much is a success, for pass@k and maj@k."
    )
    best: str | None = Field(
        default=None,
        description="Which metric of an evaluation decides the best step, as metrics.jsonl names it; none means the mean "
        "reward of the first set's sampled answers, or of its greedy ones where there are no others.",
    )
    keep_best: bool = Field(default=True, description="Keep the model of the best step in best/ of the run folder.")

    @property
    def all_sets(self) -> dict[str, EvalSetOptions]:
        """Every set by its name, that of eval.data with the name "" first, each with what it takes from this table."""
        unnamed = {} if self.data is None else {"": EvalSetOptions(data=self.data)}
        ours = {name: getattr(self, name) for name in OF_A_SET}
        return {
            name: own.model_copy(update={n: value for n, value in ours.items() if getattr(own, n) is None})
            for name, own in (unnamed | self.sets).items()
        }

    @property
    def deciding_metrics(self) -> list[str]:
        """What eval.best may be, the one first that decides if nobody says."""
        return [metric for name, own in self.all_sets.items() for metric in _deciding(name, own)]

    @property
    def deciding_metric(self) -> str:
        return self.best or self.deciding_metrics[0]

    def derived(self) -> Iterator[Derived]:
        for name, own in self.sets.items():
            for option in OF_A_SET:
                if getattr(own, option) is None and getattr(self, option) is not None:
                    yield Derived(f"sets.{name}.{option}", getattr(self, option), f"eval.{option}")
        if self.all_sets and self.best is None:
            yield Derived("best", self.deciding_metric, "the first set of held-out prompts")

    def choices(self) -> dict[str, list[Any]]:
        return {"best": list(self.deciding_metrics)}

    def problems(self) -> Iterator[Problem]:
        for name in self.sets:
            if not _SET_NAME.fullmatch(name):
                yield Problem(
                    f"sets.{name}",
                    f"must be named by letters, digits, - and _, got {name!r}. Metrics and files carry its name.",
                )
        for name, own in self.all_sets.items():
            if not own.greedy and own.num_samples == 0:
                table = f"sets.{name}." if name else ""
                yield Problem(
                    f"{table}num_samples",
                    f"must be above 0 when eval.{table}greedy = false, got 0: nothing would be evaluated.",
                )
        if self.best is not None and self.all_sets and self.best not in self.deciding_metrics:
            yield Problem("best", f"must be one of {', '.join(self.deciding_metrics)}, got {self.best!r}.")

    def idle(self) -> Iterator[Idle]:
        if not self.all_sets:
            for name in type(self).model_fields:
                if name not in ("data", "sets"):
                    yield Idle(name, "cannot act without eval.data or a table [eval.sets.NAME]")
            return
        yield from self._idle_defaults()
        for name, own in self.all_sets.items():
            table = f"sets.{name}." if name else ""
            yield Idle(f"{table}data.shuffle", "cannot act: an evaluation takes all prompts, whatever their order")
            yield Idle(f"{table}data.source_weights", "cannot act: an evaluation takes each prompt once")
            if name and own.num_samples == 0:
                for option in _OF_SAMPLES:
                    yield Idle(
                        f"{table}{option}", f"is only used for sampled answers, and those of {name} are num_samples = 0"
                    )
        if all(own.num_samples == 0 for own in self.all_sets.values()):
            yield Idle("success_reward", "is only used for sampled answers, and there are none (num_samples = 0)")

    def _idle_defaults(self) -> Iterator[Idle]:
        """Options of this table that no set takes from it."""
        for option in OF_A_SET:
            takers = [
                own for name, own in self.all_sets.items() if not name or getattr(self.sets[name], option) is None
            ]
            if not takers:
                yield Idle(option, f"cannot act: every set has a {option} of its own")
            elif option in _OF_SAMPLES and all(own.num_samples == 0 for own in takers):
                yield Idle(option, "is only used for sampled answers, and eval.num_samples = 0")
            elif option in ("temperature", "top_p") and all(own.top_k == 1 for own in takers):
                yield Idle(option, "cannot act with eval.top_k = 1: the likeliest token is taken each time")


def metric_prefix(set_name: str) -> str:
    """How the metrics of a set begin.

    >>> metric_prefix("aime") + "pass@4", metric_prefix("") + "pass@4"
    ('eval/aime/pass@4', 'eval/pass@4')
    """
    return f"eval/{set_name}/" if set_name else "eval/"


def pass_ks(num_samples: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... up to the number of samples, and that number.

    >>> pass_ks(6), pass_ks(0)
    ([1, 2, 4, 6], [])
    """
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    return sorted({*powers, num_samples}) if num_samples else []


def _deciding(name: str, own: EvalSetOptions) -> Iterator[str]:
    """Metrics of a set in which more is better. `own` has all its values."""
    count = own.num_samples or 0
    if count:
        yield f"{metric_prefix(name)}sampled_reward"
    if own.greedy:
        yield f"{metric_prefix(name)}greedy_reward"
    yield from (f"{metric_prefix(name)}pass@{k}" for k in pass_ks(count))
    if count > 1:
        yield f"{metric_prefix(name)}maj@{count}"
