"""The whole tree of options of a command."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import Field, PrivateAttr

from strop.config.advantage import NEEDS_CRITIC, NEEDS_GROUP
from strop.config.algorithm import AlgorithmOptions
from strop.config.base import Derived, Idle, Options, Problem
from strop.config.critic import CriticOptions
from strop.config.data import DataOptions, DemonstrationOptions
from strop.config.evaluation import EvalOptions
from strop.config.imitation import LossOptions, ValidationOptions
from strop.config.sampling import RewardOptions, RolloutOptions
from strop.config.training import (
    AdamWOptions,
    GuardOptions,
    ModelOptions,
    SFTRunOptions,
    SFTTrainerOptions,
    TorchEngineOptions,
    TorchTrainerOptions,
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
    algorithm: AlgorithmOptions = AlgorithmOptions()
    trainer: TorchTrainerOptions = TorchTrainerOptions()
    critic: CriticOptions = CriticOptions()
    engine: TorchEngineOptions = TorchEngineOptions()
    eval: EvalOptions = EvalOptions()
    guards: GuardOptions = GuardOptions()
    run: TrainRunOptions = TrainRunOptions()

    @property
    def max_logprob_gap(self) -> float:
        if self.guards.max_logprob_gap is not None:
            return self.guards.max_logprob_gap
        return 1e-3 if self.model.dtype == "float32" else 0.1

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
        if self.guards.max_logprob_gap is None:
            yield Derived("guards.max_logprob_gap", self.max_logprob_gap, f"model.dtype = {self.model.dtype}")
        if self.eval.max_response_tokens is None:
            for name, own in self.eval.all_sets.items():
                if own.max_response_tokens is None:
                    table = f"eval.sets.{name}" if name else "eval"
                    limit = self.rollout.max_response_tokens
                    yield Derived(f"{table}.max_response_tokens", limit, "rollout.max_response_tokens")

    def idle(self) -> Iterator[Idle]:
        if not self.has_critic:
            for name in CriticOptions.model_fields:
                yield Idle(f"critic.{name}", "is only used when algorithm.advantage.kind = gae")

    def problems(self) -> Iterator[Problem]:
        prompts, updates = self.rollout.prompts_per_step, self.algorithm.updates_per_batch
        if prompts % updates:
            yield Problem(
                "algorithm.updates_per_batch",
                f"must divide rollout.prompts_per_step, got {updates} and {prompts}. "
                f"With {prompts} prompts it may be {', '.join(map(str, _divisors(prompts)))}.",
            )
        kind, group_size = self.algorithm.advantage.kind, self.rollout.group_size
        if group_size == 1 and kind in NEEDS_GROUP:
            yield Problem(
                "rollout.group_size",
                f"must be 2 or more with algorithm.advantage.kind = {kind}, got 1: a sample that is its own baseline "
                "has advantage 0, and nothing would be learned.",
            )
        if self.algorithm.advantage.kind == "pass_at_k" and self.algorithm.advantage.k >= group_size:
            yield Problem(
                "algorithm.advantage.k",
                f"must be below rollout.group_size, got {self.algorithm.advantage.k} and {group_size}. "
                "With one set of all rollouts every advantage is 0.",
            )
        yield from self._critic_problems()
        if self.reward.kind == "dataset" and self.data.kind != "reasoning_gym":
            yield Problem(
                "reward.kind",
                f"must not be dataset with data.kind = {self.data.kind}: that source has no scorer of its own. "
                "Use exact, number, math or function.",
            )
        yield from self._eval_reward_problems()

    def _eval_reward_problems(self) -> Iterator[Problem]:
        """A dataset's own scorer where the held-out prompts come from no dataset."""
        for name, own in self.eval.all_sets.items():
            if own.data.kind == "reasoning_gym" or (own.reward or self.reward).kind != "dataset":
                continue
            table = f"eval.sets.{name}" if name else "eval"
            advice = "Give it a reward of its own." if own.reward is None else f"Set another {table}.reward.kind."
            if not name:
                advice = "Make it a table [eval.sets.NAME], which may have a reward of its own."
            yield Problem(
                f"{table}.data.kind",
                f"must be reasoning_gym where the reward is of kind dataset, got {own.data.kind}: that source has no "
                f"scorer of its own. {advice}",
            )

    def _critic_problems(self) -> Iterator[Problem]:
        if self.critic.only_first_steps >= self.run.num_steps:
            yield Problem(
                "critic.only_first_steps",
                f"must be below run.num_steps, got {self.critic.only_first_steps} and {self.run.num_steps}: the policy would "
                "never learn.",
            )
            return
        updates, alone = self.algorithm.updates_per_batch, self.critic.only_first_steps
        batches = f"run.num_steps = {self.run.num_steps}"
        learning = f"({batches} - critic.only_first_steps = {alone})" if alone else batches
        by_updates = f"x algorithm.updates_per_batch = {updates}"
        yield from warmup_fits("trainer", self.trainer, self.num_optimizer_steps, f"{learning} {by_updates}")
        if self.has_critic:
            yield from warmup_fits("critic", self.critic, self.num_critic_steps, f"{batches} {by_updates}")

    def warnings(self) -> Iterator[str]:
        """Options that wait for a step the run does not have: allowed, since runs are shortened to try them."""
        last = self.run.num_steps
        for path, every, consequence in (
            ("eval.every_steps", self.eval.every_steps, "the only evaluations are those before and after the run"),
            (
                "algorithm.kl.refresh_steps",
                self.algorithm.kl.refresh_steps,
                "no step learns against a refreshed reference",
            ),
        ):
            if every >= last:
                yield f"{path} = {every} is not below run.num_steps = {last}: {consequence}."
        checkpoints = self.run.checkpoint_every_steps
        if checkpoints > last:
            yield (
                f"run.checkpoint_every_steps = {checkpoints} is above run.num_steps = {last}: "
                "the only checkpoint is the one at the end."
            )
        yield from self._unreached()
        yield from unreached_schedule(self.trainer, self.num_optimizer_steps)

    def _unreached(self) -> Iterator[str]:
        """What adapts or keeps over more steps than there are."""
        last, every, keep = self.run.num_steps, self.run.checkpoint_every_steps, self.run.keep_checkpoints
        kl = self.algorithm.kl
        if last == 1 and kl.coef > 0 and kl.target is not None:
            yield "algorithm.kl.target cannot act with run.num_steps = 1: the coefficient changes after the first batch."
        if last == 1 and self.algorithm.entropy_target is not None:
            yield "algorithm.entropy_target cannot act with run.num_steps = 1: the weight changes after the first batch."
        num_checkpoints = -(-last // every) if every else 0
        default = type(self.run).model_fields["keep_checkpoints"].default
        if every and keep > num_checkpoints and keep != default:
            yield (
                f"run.keep_checkpoints = {keep} is above the {num_checkpoints} that the run makes (run.num_steps = {last}, "
                f"run.checkpoint_every_steps = {every}): none is removed."
            )


class SFTConfig(RootConfig):
    """Options of `strop sft`."""

    seed: int = Field(default=0, ge=0, lt=2**63, description="Everything random in a run follows from it.")
    model: ModelOptions
    data: DemonstrationOptions
    loss: LossOptions = LossOptions()
    trainer: SFTTrainerOptions = SFTTrainerOptions()
    validation: ValidationOptions = ValidationOptions()
    run: SFTRunOptions = SFTRunOptions()

    def problems(self) -> Iterator[Problem]:
        if self.run.num_steps is not None:  # that of num_epochs is known when the demonstrations are
            product = f"run.num_steps = {self.run.num_steps}"
            yield from warmup_fits("trainer", self.trainer, self.run.num_steps, product)
        if self.loss.reduction == "constant_length" and self.data.max_length_tokens is None:
            yield Problem(
                "data.max_length_tokens",
                "must be given with loss.reduction = constant_length, got none: it is the constant.",
            )

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
        ):
            if every > num_steps:
                yield f"{path} = {every} is above {limit}: {consequence}."
        yield from unreached_schedule(self.trainer, num_steps)


def _divisors(number: int, most: int = 12) -> list[int]:
    """The smallest divisors of a number."""
    small = (n for n in range(1, min(number, 10_000) + 1) if number % n == 0)
    return list(islice(small, most))


def unreached_schedule(trainer: AdamWOptions, num_optimizer_steps: int) -> Iterator[str]:
    """What of the optimizer needs a second step."""
    if trainer.lr_schedule != "constant" and num_optimizer_steps - trainer.warmup_steps <= 1:
        yield (
            f"trainer.lr_schedule = {trainer.lr_schedule} is the same as constant: of the run's {num_optimizer_steps} "
            "optimizer steps one comes after the warm-up, and has the peak."
        )
    for name in ("beta1", "beta2"):
        value, default = getattr(trainer, name), type(trainer).model_fields[name].default
        if num_optimizer_steps == 1 and value != default:
            yield f"trainer.{name} = {value:g} cannot act in a run of one optimizer step: AdamW corrects the first one for it."


def warmup_fits(table: str, options: AdamWOptions, num_optimizer_steps: int, product: str) -> Iterator[Problem]:
    """A warmup that would outlast the run."""
    if options.warmup_steps >= num_optimizer_steps:
        yield Problem(
            f"{table}.warmup_steps",
            f"must be below the run's {num_optimizer_steps} optimizer steps ({product}), got {options.warmup_steps}.",
        )
