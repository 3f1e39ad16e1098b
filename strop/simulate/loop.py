"""The synchronous and the asynchronous loop as a discrete-event simulation.

Batch k is trained at policy version k U, U = updates_per_batch, and its prompts are given to the engines as soon as the
engines have a version of at least k U - max_off_policy_steps; no rollout is staler than that. With 0 steps ahead this is the
synchronous loop. A group is scored when it is complete; without `scores_early` the synchronous loop scores when all of a
batch is sampled.

What a real loop does beyond this and is left out: prefill, filters, evaluations, the writing of checkpoints.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from strop.config.simulation import SimulationConfig
from strop.simulate.engine import Fleet, Sample
from strop.types import UserError

_MOST_FAILURES = 100  # for each step, of an engine or of all trainers: with more, it gets nowhere


@dataclass(frozen=True)
class SimulatedStep:
    """A step of training as it was made: times in seconds since the step before it was over."""

    ended_s: float  # since the beginning of the run
    waited_s: float  # for its batch
    trained_s: float
    response_tokens: int
    staleness: float  # mean over rollouts, in optimizer steps, of the oldest token
    staleness_max: int


@dataclass(frozen=True)
class Outcome:
    """What a simulated loop did, whole runs from the first prompt to the last weight transfer."""

    config: SimulationConfig
    steps: Sequence[SimulatedStep]  # those that were lost and made again included
    seconds: float
    engines_busy: float  # share of the time of all engines with a sequence to decode
    occupancy: float  # mean share of max_sequences that an engine decodes
    trainers_busy: float
    num_engine_failures: int
    num_trainer_failures: int

    @property
    def num_gpus(self) -> int:
        return self.config.num_gpus

    @property
    def steps_per_hour(self) -> float:
        """Steps that count; those that a failure undid do not."""
        return 3600 * self.config.num_steps / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of the steps that count."""
        share = self.config.num_steps / len(self.steps)
        return share * sum(step.response_tokens for step in self.steps) / self.seconds

    @property
    def cost_per_step(self) -> float:
        return self.num_gpus * self.config.gpu_hour_cost / self.steps_per_hour

    @property
    def staleness(self) -> float:
        return sum(step.staleness for step in self.steps) / len(self.steps)

    @property
    def staleness_max(self) -> int:
        return max(step.staleness_max for step in self.steps)


def simulate(config: SimulationConfig, *, tell: Callable[[int], None] = lambda _: None) -> Outcome:
    """Run the loop of a plan, the synchronous one where `max_off_policy_steps` is 0.

    Args:
        config: the plan.
        tell: told of the number of steps that count, after each.

    Raises:
        UserError: failures come faster than work is done.
    """
    loop = _Loop(config, tell)
    loop.env.run(until=loop.env.process(loop.train()))
    seconds, engines = float(loop.env.now), loop.fleet.engines
    engine_seconds = seconds * len(engines)
    return Outcome(
        config,
        loop.steps,
        seconds,
        engines_busy=sum(engine.busy_s for engine in engines) / engine_seconds,
        occupancy=sum(engine.sequence_s for engine in engines) / (engine_seconds * config.max_sequences),
        trainers_busy=loop.trained_s / seconds,
        num_engine_failures=loop.num_engine_failures,
        num_trainer_failures=loop.num_trainer_failures,
    )


@dataclass(slots=True)
class _Batch:
    ready: simpy.Event
    num_units: int
    samples: list[Sample] = field(default_factory=list)


@dataclass(slots=True)
class _Unit:
    """What is scored together: a group, or without `scores_early` a batch."""

    batch: _Batch
    size: int
    left: int


class _Scorers:
    """`num_scorers` that each take `score_s` for a rollout, first come, first served: when each is free again."""

    def __init__(self, config: SimulationConfig) -> None:
        self._free, self._score_s = [0.0] * config.num_scorers, config.score_s

    def end_of(self, now: float, num_rollouts: int) -> float:
        """When that many rollouts, which came now, are all scored."""
        end = now
        for _ in range(num_rollouts if self._score_s else 0):
            end = max(self._free[0], now) + self._score_s
            heapq.heapreplace(self._free, end)
        return end


class _Loop:
    def __init__(self, config: SimulationConfig, tell: Callable[[int], None]) -> None:
        self.env, self.config, self._tell = simpy.Environment(), config, tell
        self.fleet = Fleet(self.env, config, self._sampled)
        self.steps: list[SimulatedStep] = []
        self.trained_s, self.num_engine_failures, self.num_trainer_failures = 0.0, 0, 0
        self._scorers, self._batches = _Scorers(config), list[_Batch]()
        self._lengths, self._failures = random.Random(config.seed), random.Random(~config.seed)
        self._num_wanted = config.num_steps  # batches, with those that failures undo
        self._trainer_fails_at = self._next_trainer_failure()
        for engine in self.fleet.engines if config.engine_mtbf_h else ():
            self.env.process(self._failing(engine))

    def train(self) -> Any:
        """Train on one batch after the other until as many steps count as are wanted."""
        config, num_kept = self.config, 0
        while num_kept < config.num_steps:
            began, made = self.env.now, len(self.steps)
            self._release(made + config.batches_ahead)
            batch = self._batches[made]
            yield batch.ready
            waited_s = self.env.now - began
            tokens = sum(sample.num_tokens for sample in batch.samples)
            num_prompt_tokens = config.prompt_tokens * len(batch.samples)
            train_s = config.train_step_s + config.train_token_s * (tokens + num_prompt_tokens) / config.num_trainers
            while self.env.now + train_s > self._trainer_fails_at:
                num_lost = num_kept % config.checkpoint_every_steps
                num_kept, self._num_wanted = num_kept - num_lost, self._num_wanted + num_lost
                yield from self._fail_trainer()
            yield self.env.timeout(train_s)
            self.trained_s += train_s
            self.fleet.stop()
            yield self.env.timeout(config.transfer_s)
            self.fleet.go((made + 1) * config.updates_per_batch)
            num_kept += 1
            ages = [made * config.updates_per_batch - sample.version for sample in batch.samples]
            self.steps.append(SimulatedStep(self.env.now, waited_s, train_s, tokens, sum(ages) / len(ages), max(ages)))
            batch.samples.clear()
            self._tell(num_kept)

    def _release(self, last: int) -> None:
        """Give the engines all batches up to this one that they do not have yet."""
        config = self.config
        by_group = config.scores_early or config.batches_ahead > 0
        while len(self._batches) <= min(last, self._num_wanted - 1):
            units = config.prompts_per_step if by_group else 1
            batch = _Batch(self.env.event(), units)
            size = config.prompts_per_step * config.group_size // units
            whole = _Unit(batch, size, size)
            groups = []
            for _ in range(config.prompts_per_step):
                unit = _Unit(batch, size, size) if by_group else whole
                groups.append([Sample(self._length(), unit) for _ in range(config.group_size)])
            batch.samples = [sample for group in groups for sample in group]
            self._batches.append(batch)
            self.fleet.submit(groups)

    def _length(self) -> int:
        config = self.config
        if config.response_tokens:
            drawn: float = self._lengths.choice(config.response_tokens)
        else:
            sigma = config.response_tokens_sigma
            drawn = config.mean_response_tokens * math.exp(self._lengths.gauss(0, sigma) - sigma**2 / 2)
        return max(1, round(min(drawn, config.max_response_tokens or math.inf)))

    def _sampled(self, sample: Sample) -> None:
        unit = sample.unit
        unit.left -= 1
        if not unit.left:
            end = self._scorers.end_of(self.env.now, unit.size)
            self.env.timeout(end - self.env.now).callbacks.append(lambda _: self._scored(unit.batch))

    def _scored(self, batch: _Batch) -> None:
        batch.num_units -= 1
        if not batch.num_units:
            batch.ready.succeed()

    def _next_trainer_failure(self) -> float:
        mean_h = self.config.trainer_mtbf_h
        if mean_h is None:
            return math.inf
        return self.env.now + self._failures.expovariate(self.config.num_trainers / (3600 * mean_h))

    def _fail_trainer(self) -> Any:
        """A failure while a batch waited is noticed when it is trained."""
        self.num_trainer_failures += 1
        self._check_failures("trainer_mtbf_h", self.num_trainer_failures)
        yield self.env.timeout(max(self._trainer_fails_at - self.env.now, 0.0) + self.config.trainer_restart_s)
        self._trainer_fails_at = self._next_trainer_failure()

    def _failing(self, engine: Any) -> Any:
        mean_h = self.config.engine_mtbf_h
        assert mean_h is not None
        while True:
            yield self.env.timeout(self._failures.expovariate(1 / (3600 * mean_h)))
            self.num_engine_failures += 1
            self._check_failures("engine_mtbf_h", self.num_engine_failures / len(self.fleet.engines))
            engine.stop(loses=True)
            yield self.env.timeout(self.config.engine_restart_s)
            engine.go()

    def _check_failures(self, option: str, number: float) -> None:
        if number > _MOST_FAILURES * self.config.num_steps:
            raise UserError(
                f"{option} must leave time to work between two failures, got {getattr(self.config, option):g}: after "
                f"{len(self.steps)} steps there were {_MOST_FAILURES} failures for each step of the plan. Raise it."
            )
