"""Options of distillation: a teacher scores the student's own samples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from strop.config.addresses import is_address, is_host_and_port
from strop.config.base import Derived, Idle, Options, Problem

if TYPE_CHECKING:
    from strop.config.root import TrainConfig


_HOST_AND_PORT = re.compile(r"(localhost|[\w-]+(\.[\w-]+)+):\d+")


class DistillationOptions(Options):
    """Teachers score the student's own samples, and every token learns from its distance to them."""

    teacher: str | None = Field(
        default=None,
        description="Model folder or name of the teacher, or http://host:port of a vLLM server; none: no distillation.",
    )
    teachers: dict[str, str] = Field(
        default_factory=dict,
        description="Teachers by source of the data, as folders or addresses; sources not named have distillation.teacher.",
    )
    teacher_coef: float = Field(default=1.0, gt=0, description="Weight of the teacher's signal, in advantage per nat.")
    alone: bool = Field(
        default=False,
        description="The teacher's signal replaces the advantages of rewards, which are then only measured.",
    )
    teacher_gamma: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Discount with which a token answers for the distances of later ones; 0: for its own alone.",
    )
    teacher_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Type of the weights of teachers in this process; none means model.dtype."
    )
    teacher_device: str | None = Field(
        default=None, description="Device of teachers in this process; none means model.device."
    )
    request_timeout_s: float = Field(
        default=300.0, gt=0, description="How long an answer of a teacher's server may take, in seconds."
    )
    num_retries: int = Field(
        default=3,
        ge=0,
        le=100,
        description="How often a request is sent again that a teacher's server failed to answer.",
    )

    @property
    def is_on(self) -> bool:
        return bool(self.places)

    @property
    def places(self) -> list[str]:
        """Folders and addresses of all teachers, each once."""
        return list(dict.fromkeys([*([self.teacher] if self.teacher is not None else []), *self.teachers.values()]))

    @property
    def addresses(self) -> list[str]:
        return [place for place in self.places if is_address(place)]

    def option_of(self, place: str) -> str:
        """The option that names this teacher."""
        source = next((source for source, other in self.teachers.items() if other == place), None)
        return "distillation.teacher" if place == self.teacher else f"distillation.teachers.{source}"

    def problems(self) -> Iterator[Problem]:
        for place in self.places:
            key = self.option_of(place).removeprefix("distillation.")
            if _HOST_AND_PORT.fullmatch(place):
                yield Problem(key, f"must begin with http:// where it is the address of a server, got {place}.")
            elif not place.strip():
                yield Problem(key, f"must be a model folder, a name or http://host:port, got {place!r}.")
            elif is_address(place) and not is_host_and_port(place):
                yield Problem(
                    key,
                    f"must be http://host:port with a port up to 65535 and without a path, got {place}. strop adds "
                    "/v1/completions and the like.",
                )

    def idle(self) -> Iterator[Idle]:
        if not self.is_on:
            for name in type(self).model_fields:
                if not name.startswith("teacher") or name.startswith("teacher_"):
                    yield Idle(name, "cannot act without distillation.teacher or distillation.teachers")
            return
        if not self.addresses:
            for name in ("request_timeout_s", "num_retries"):
                yield Idle(name, "is only used when a teacher is the address of a server")
        if len(self.addresses) == len(self.places):
            for name in ("teacher_dtype", "teacher_device"):
                yield Idle(name, "is only used when a teacher is a model folder")


def problems_beside(config: TrainConfig) -> Iterator[Problem]:
    """Rules that span distillation and other tables of the config."""
    options, algorithm = config.distillation, config.algorithm
    if config.reward.kind == "none" and not (options.is_on and options.alone):
        yield Problem(
            "reward.kind",
            "must not be none without distillation.alone = true and a teacher, got none: there would be nothing to learn from, "
            "and nothing to evaluate. Use exact, number, math, code, dataset or function.",
        )
    for name, own in config.eval.all_sets.items() if config.reward.kind == "none" else ():
        if own.reward is None:
            yield Problem(
                "reward.kind",
                f"must not be none with eval.{f'sets.{name}.' if name else ''}data, got none: an evaluation scores answers. "
                "Name a reward for the run, or make it a table [eval.sets.NAME], which may have a reward of its own.",
            )
    if not options.is_on:
        return
    for place in options.addresses if config.rollout.temperature != 1 else []:
        yield Problem(
            "rollout.temperature",
            f"must be 1 with {options.option_of(place)} = {place}, got {config.rollout.temperature:g}: a server scores at "
            "temperature 1, and signals at two temperatures are not a distance. Use a model folder as the teacher.",
        )
    if algorithm.policy_loss.needs_one_advantage:
        kind = algorithm.policy_loss.kind
        yield Problem(
            "algorithm.policy_loss.kind",
            f"must not be {kind} with {options.option_of(options.places[0])}, got {kind}: it is a loss of whole sequences, "
            "with one advantage each, and a teacher gives each token its own. Use gspo_token or a loss of tokens, such as "
            "ppo_clip.",
        )
    if options.alone and config.length_penalty.kind != "none":
        yield Problem(
            "length_penalty.kind",
            f"must be none with distillation.alone = true, got {config.length_penalty.kind}: rewards are only measured.",
        )
    if options.alone and algorithm.advantage.kind == "gae":
        yield Problem(
            "algorithm.advantage.kind",
            "must not be gae with distillation.alone = true, got gae: a critic learns from rewards, which are only measured.",
        )
    if options.alone and algorithm.kl.coef > 0 and algorithm.kl.place == "reward":
        yield Problem(
            "algorithm.kl.place",
            "must be loss with distillation.alone = true, got reward: advantages of rewards are not computed then.",
        )


def idle_beside(config: TrainConfig) -> Iterator[Idle]:
    """Options of other tables that cannot act beside a teacher."""
    if not (config.distillation.is_on and config.distillation.alone):
        return
    reason = "cannot act with distillation.alone = true: advantages of rewards are not computed then"
    for name, _ in config.algorithm.advantage:
        yield Idle(f"algorithm.advantage.{name}", reason)
    yield Idle("algorithm.whiten_advantages", reason)
    if config.reward.kind == "none":
        for name in ("filter.equal_rewards", "curriculum.kind"):
            yield Idle(name, "cannot act with reward.kind = none")


def derived_beside(config: TrainConfig) -> Iterator[Derived]:
    """What the options of a local teacher stand for where they follow from those of the model."""
    options = config.distillation
    if len(options.places) > len(options.addresses):
        for name in ("dtype", "device"):
            if vars(options)[f"teacher_{name}"] is None:
                yield Derived(f"distillation.teacher_{name}", vars(config.model)[name], f"model.{name}")
