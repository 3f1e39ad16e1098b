"""The whole tree of options of a command."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

from pydantic import Field, PrivateAttr

from strop.config import train_rules
from strop.config.advantage import NEEDS_CRITIC
from strop.config.algorithm import AlgorithmOptions
from strop.config.base import Derived, Idle, Options, Problem
from strop.config.critic import CriticOptions
from strop.config.data import DataOptions, DemonstrationOptions
from strop.config.distillation import DistillationOptions
from strop.config.engine import EngineOptions, TorchEngineOptions
from strop.config.evaluation import EvalOptions
from strop.config.filtering import (
    CurriculumOptions,
    FilterOptions,
    LengthPenaltyOptions,
    NoCurriculumOptions,
    NoLengthPenaltyOptions,
)
from strop.config.guards import GuardOptions
from strop.config.imitation import LossOptions, ValidationOptions
from strop.config.lora import LoraOptions
from strop.config.sampling import RewardOptions, RolloutOptions
from strop.config.training import (
    ModelOptions,
    SFTRunOptions,
    SFTTrainerOptions,
    TorchTrainerOptions,
    TrainerOptions,
    TrainRunOptions,
)
from strop.config.tree import walk


class RootConfig(Options):
    """A whole tree: it knows where each of its values comes from and what the run is called."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _name: str = PrivateAttr(default="run")

    def remember(self, origins: dict[str, str], *, name: str) -> None:
        """Called once, by the loader."""
        self._origins, self._name = dict(origins), name

    @property
    def origins(self) -> dict[str, str]:
        """Path of an option to where its value was set; what is not in it is a default."""
        return self._origins

    def origin(self, path: str) -> str:
        """Where the value of an option was set; of a free table, where its entries were."""
        if path in self._origins:
            return self._origins[path]
        below = dict.fromkeys(origin for p, origin in self._origins.items() if p.startswith(f"{path}."))
        return " and ".join(below) or "default"

    def all_derived(self) -> dict[str, Derived]:
        """Path of an option to what it stands for, where that follows from another."""
        tables = ((f"{prefix}." if prefix else "", table) for prefix, table in walk(self))
        return {dot + found.key: found for dot, table in tables for found in table.derived()}

    def derived(self) -> Iterator[Derived]:
        if str(self.folder) != self.run.folder:  # type: ignore[attr-defined]
            yield Derived("run.folder", str(self.folder), "the config file's name")

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run.folder.replace("{name}", self._name))  # type: ignore[attr-defined]


class TrainConfig(RootConfig):
    """Options of `strop train`, `strop eval` and `strop explain`."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="Everything random in a run follows from it.")
    model: ModelOptions
    data: DataOptions
    rollout: RolloutOptions = RolloutOptions()
    reward: RewardOptions
    length_penalty: LengthPenaltyOptions = NoLengthPenaltyOptions()
    filter: FilterOptions = FilterOptions()
    curriculum: CurriculumOptions = NoCurriculumOptions()
    algorithm: AlgorithmOptions = AlgorithmOptions()
    distillation: DistillationOptions = DistillationOptions()
    trainer: TrainerOptions = TorchTrainerOptions()
    lora: LoraOptions = LoraOptions()
    critic: CriticOptions = CriticOptions()
    engine: EngineOptions = TorchEngineOptions()
    eval: EvalOptions = EvalOptions()
    guards: GuardOptions = GuardOptions()
    run: TrainRunOptions = TrainRunOptions()

    @property
    def max_logprob_gap(self) -> float:
        if self.guards.max_logprob_gap is not None:
            return self.guards.max_logprob_gap
        if self.rollout.from_folder is not None:
            return inf  # the policy leaves the one that sampled
        return 1e-3 if self.model.dtype == "float32" else 0.1

    @property
    def batches_ahead(self) -> int:
        """Batches of rollouts that may be sampled before their turn comes."""
        return self.rollout.max_off_policy_steps // self.algorithm.updates_per_batch

    @property
    def may_be_stale(self) -> bool:
        """True if a batch may have tokens of an older policy than the one that is about to learn from it."""
        return self.rollout.max_off_policy_steps > 0 or self.filter.surplus == "keep"

    @property
    def may_use_recorded(self) -> bool:
        """True if algorithm.old_logprobs = rollout would act, and nothing else makes up for rollouts of another policy."""
        algorithm = self.algorithm
        corrected = algorithm.correction.kind != "none" or algorithm.veto_ratio is not None
        return algorithm.uses_old_logprobs and not corrected

    @property
    def has_critic(self) -> bool:
        return self.algorithm.advantage.kind in NEEDS_CRITIC

    @property
    def num_optimizer_steps(self) -> int:
        """Of the policy; in the first batches only the critic may learn."""
        return (self.run.num_steps - self.critic.only_first_steps) * self.algorithm.updates_per_batch

    @property
    def num_critic_steps(self) -> int:
        """Optimizer steps of the critic."""
        return self.run.num_steps * self.algorithm.updates_per_batch

    def derived(self) -> Iterator[Derived]:
        yield from super().derived()
        yield from train_rules.derived(self)

    def problems(self) -> Iterator[Problem]:
        yield from train_rules.problems(self)

    def idle(self) -> Iterator[Idle]:
        yield from train_rules.idle(self)

    def warnings(self) -> Iterator[str]:
        yield from train_rules.warnings(self)


class SFTConfig(RootConfig):
    """Options of `strop sft`."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="Everything random in a run follows from it.")
    model: ModelOptions
    data: DemonstrationOptions
    loss: LossOptions = LossOptions()
    trainer: SFTTrainerOptions = SFTTrainerOptions()
    lora: LoraOptions = LoraOptions()
    validation: ValidationOptions = ValidationOptions()
    run: SFTRunOptions = SFTRunOptions()

    def problems(self) -> Iterator[Problem]:
        yield from train_rules.processes_fit(self.trainer, self.model, self.lora)
        if self.run.num_steps is not None:  # that of num_epochs is known when the demonstrations are
            product = f"run.num_steps = {self.run.num_steps}"
            yield from train_rules.warmup_fits("trainer", self.trainer, self.run.num_steps, product)
        if self.loss.reduction == "constant_length" and self.data.max_length_tokens is None:
            yield Problem(
                "data.max_length_tokens",
                "must be given with loss.reduction = constant_length, got none: it is the constant.",
            )

    def idle(self) -> Iterator[Idle]:
        if self.validation.data is None and self.run.checkpoint_every_steps:
            yield Idle("run.keep_best_checkpoint", "is only used with held-out demonstrations (validation.data)")

    def warnings(self) -> Iterator[str]:
        if self.run.num_steps is not None:  # as above
            yield from self.waiting_for(self.run.num_steps, f"run.num_steps = {self.run.num_steps}")

    def waiting_for(self, num_steps: int, limit: str) -> Iterator[str]:
        """Options that wait for a step the run does not have: allowed, since runs are shortened to try them."""
        for path, every, consequence in (
            ("validation.every_steps", self.validation.every_steps, "the only validations are those before and after"),
            (
                "run.checkpoint_every_steps",
                self.run.checkpoint_every_steps,
                "the only checkpoint is the one at the end",
            ),
            ("run.keep_every_steps", self.run.keep_every_steps, "no checkpoint stays for good"),
        ):
            if every > num_steps:
                yield f"{path} = {every} is above {limit}: {consequence}."
        yield from train_rules.unreached_schedule(self.trainer, num_steps)
