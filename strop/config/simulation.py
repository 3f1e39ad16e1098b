"""Options of `strop simulate`: what a step is, what each part of it takes, and how many GPUs there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from strop.config.base import Derived, Idle, Problem
from strop.config.load import make_config
from strop.config.root import RootConfig
from strop.config.toml_file import read_toml
from strop.types import ConfigError

_MOST_ROLLOUTS = 5 * 10**7


class SimulationConfig(RootConfig):
    """A plan of a run. Times are in seconds; a failure rate is given as the mean hours between two failures."""

    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Lengths and failures follow from it; both loops get the same lengths."
    )
    num_steps: int = Field(
        default=20,
        ge=1,
        le=10**6,
        description="Steps that are simulated: one batch of rollouts and one weight transfer each.",
    )
    prompts_per_step: int = Field(default=64, ge=1, le=10**6, description="Prompts of a step.")
    group_size: int = Field(
        default=8, ge=1, le=10**5, description="Rollouts per prompt; an engine gets all of a group."
    )
    updates_per_batch: int = Field(
        default=1,
        ge=1,
        le=10**4,
        description="Optimizer steps that a step makes from its batch; staleness counts these.",
    )
    max_off_policy_steps: int = Field(
        default=1,
        ge=0,
        le=10**6,
        description="Of the asynchronous loop: optimizer steps by which sampling may be ahead of training. 0: it is the "
        "synchronous loop.",
    )
    response_tokens: tuple[Annotated[int, Field(ge=1, le=10**8)], ...] = Field(
        default=(),
        description="Lengths of responses, in tokens; each rollout draws one of them. []: they are log-normal.",
    )
    mean_response_tokens: float = Field(
        default=1000.0,
        ge=1,
        le=1e8,
        description="Mean length of a response, in tokens, before max_response_tokens cuts it.",
    )
    response_tokens_sigma: float = Field(
        default=0.8,
        ge=0,
        le=5,
        description="Standard deviation of the logarithm of a response's length. 0: all are equally long.",
    )
    max_response_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**8,
        description="Longest response, in tokens; longer ones are cut. none: nothing is cut.",
    )
    prompt_tokens: float = Field(
        default=200.0,
        ge=0,
        le=1e8,
        description="Mean length of a prompt, in tokens; training reads it with every response.",
    )
    num_engines: int = Field(default=1, ge=1, le=10**5, description="Engines that sample.")
    gpus_per_engine: int = Field(default=1, ge=1, le=10**4, description="GPUs of one engine.")
    max_sequences: int = Field(
        default=64, ge=1, le=65536, description="Sequences that an engine decodes at the same time; the others wait."
    )
    decode_step_s: float = Field(
        default=0.01,
        ge=0,
        le=1e6,
        description="Seconds of a decode step of an engine, whatever the number of its sequences.",
    )
    decode_sequence_s: float = Field(
        default=1e-4, ge=0, le=1e6, description="Seconds that each sequence in it adds to a decode step."
    )
    score_s: float = Field(default=0.01, ge=0, le=1e6, description="Seconds that one scorer takes for one rollout.")
    num_scorers: int = Field(default=1, ge=1, le=10**5, description="Rollouts that are scored at the same time.")
    scores_early: bool = Field(
        default=True,
        description="The synchronous loop scores a group while others are sampled, as rewards in processes of their own do. "
        "false: it scores when all of a batch is sampled.",
    )
    num_trainers: int = Field(default=1, ge=1, le=10**6, description="GPUs that train.")
    train_step_s: float = Field(
        default=1.0, ge=0, le=1e7, description="Seconds of training a batch that more GPUs do not shorten."
    )
    train_token_s: float = Field(
        default=1e-4,
        ge=0,
        le=1e6,
        description="GPU seconds of training for each token of prompts and responses; num_trainers divides them. All forward "
        "passes and updates_per_batch are in it.",
    )
    transfer_s: float = Field(
        default=1.0,
        ge=0,
        le=1e6,
        description="Seconds that new weights take to all engines; sampling and training wait.",
    )
    shared_gpus: bool = Field(
        default=False,
        description="The synchronous loop samples and trains on the same GPUs, by turns; they are as many as the larger of "
        "both parts needs.",
    )
    split_gpus: int | None = Field(
        default=None, ge=2, le=10**6, description="GPUs that the proposal splits. none: as many as the plan has."
    )
    engine_mtbf_h: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Mean hours between two failures of one engine. none: engines do not fail.",
    )
    engine_restart_s: float = Field(
        default=120.0,
        ge=0,
        le=1e7,
        description="Seconds until a failed engine samples again; what it had in flight begins anew.",
    )
    trainer_mtbf_h: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        description="Mean hours between two failures of one training GPU. none: they do not fail.",
    )
    trainer_restart_s: float = Field(
        default=300.0,
        ge=0,
        le=1e7,
        description="Seconds until training goes on after a failure, from the last checkpoint.",
    )
    checkpoint_every_steps: int = Field(
        default=10,
        ge=1,
        le=10**6,
        description="Steps between two checkpoints; those since the last one are made again.",
    )
    gpu_hour_cost: float = Field(default=2.0, ge=0, le=1e6, description="Price of a GPU for an hour, in any currency.")

    @property
    def batches_ahead(self) -> int:
        """Batches that sampling may be ahead by: a batch moves the policy by updates_per_batch optimizer steps."""
        return self.max_off_policy_steps // self.updates_per_batch

    @property
    def num_gpus(self) -> int:
        """GPUs of both parts; where they are shared, of the larger one."""
        sampling = self.num_engines * self.gpus_per_engine
        return max(sampling, self.num_trainers) if self.shared_gpus else sampling + self.num_trainers

    def derived(self) -> Iterator[Derived]:
        yield Derived("split_gpus", self.gpus_to_split, "the plan's GPUs")

    @property
    def gpus_to_split(self) -> int:
        return self.num_gpus if self.split_gpus is None else self.split_gpus

    def problems(self) -> Iterator[Problem]:
        if self.decode_step_s == self.decode_sequence_s == 0:
            yield Problem("decode_step_s", "must be above 0 where decode_sequence_s is 0: sampling would take no time.")
        num_rollouts = self.num_steps * self.prompts_per_step * self.group_size
        if num_rollouts > _MOST_ROLLOUTS:
            yield Problem(
                "num_steps",
                f"times prompts_per_step times group_size must be at most {_MOST_ROLLOUTS:g} rollouts, got {num_rollouts:g}: a "
                "simulation of more takes hours. Lower num_steps.",
            )
        if 0 < self.max_off_policy_steps < self.updates_per_batch:
            yield Problem(
                "max_off_policy_steps",
                f"must be 0 or at least updates_per_batch = {self.updates_per_batch}, got {self.max_off_policy_steps}: one "
                "batch ahead is that many optimizer steps.",
            )

    def idle(self) -> Iterator[Idle]:
        if self.response_tokens:
            for name in ("mean_response_tokens", "response_tokens_sigma"):
                yield Idle(name, "is not used where response_tokens gives the lengths")
        if self.engine_mtbf_h is None:
            yield Idle("engine_restart_s", "is only used with engine_mtbf_h")
        if self.trainer_mtbf_h is None:
            for name in ("trainer_restart_s", "checkpoint_every_steps"):
                yield Idle(name, "is only used with trainer_mtbf_h")


def load_simulation(
    path: Path | None, overrides: Mapping[str, Any], *, measured: Mapping[str, Any] | None = None
) -> SimulationConfig:
    """The plan that a TOML file and flags give, over what was measured in a run.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    values, text = ({}, "") if path is None else read_toml(path)
    if {"model", "data"} & values.keys():
        raise ConfigError(
            f"{path} is a config of a run, and strop simulate takes times: name a run folder with --from-run, or write a plan "
            "(strop simulate --help lists its options)."
        )
    below = dict(measured or {})
    if {"mean_response_tokens", "response_tokens_sigma"} & {*values, *overrides}:
        below.pop("response_tokens", None)  # what somebody says of lengths wins over those of the run
    file = "command line" if path is None else str(path)
    return make_config(SimulationConfig, {**below, **values}, overrides, file=file, text=text)
