"""Everything that a training run holds, opened in one place from its config."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from strop import interrupts
from strop.algorithms import PolicyObjective
from strop.config import DataOptions, RewardOptions, TorchEngineOptions, TrainConfig, VLLMInProcessOptions, to_toml
from strop.data import Cursor, load_prompts, make_cursor
from strop.engines import TorchEngine
from strop.observe.console import Console
from strop.rewards import Scorer, label_check, make_scorer
from strop.rollout import Filters
from strop.rollout.single_turn import Decode
from strop.runtime.best import Best
from strop.runtime.cluster.connection import check_has_room, room_of_run
from strop.runtime.critics import open_critic
from strop.runtime.engine_kinds import check_engine, served_engine
from strop.runtime.evaluation import Evaluation, HeldOut, response_limit
from strop.runtime.from_rollouts import RecordedRollouts, open_recorded
from strop.runtime.guard_memory import GuardMemory
from strop.runtime.models import LoadedModel, check_length, check_stop_token_ids, load_model, set_threads
from strop.runtime.random_states import random_states
from strop.runtime.ranks import open_ranks
from strop.runtime.run_folder import RunFolder
from strop.runtime.teachers import Teachers, open_teachers
from strop.runtime.trainer_kinds import PolicyTrainer, check_trainer, trainer_class
from strop.runtime.writer import CheckpointWriter
from strop.trainers import TorchCritic, WholeWeights, attach_adapters, check_peft
from strop.types import ConfigError, Engine, Group, Prompt, Rollout, StepMetrics, WeightSource


@dataclass(frozen=True)
class Collected:
    """A batch of scored rollouts, and what collecting it said as metrics."""

    rollouts: tuple[Rollout, ...]
    metrics: StepMetrics


Owed = tuple[tuple[int, int], ...]  # prompts whose samples are not all there: number among all sampled, and row


@dataclass(frozen=True)
class Place:
    """Where collecting stood when a step was done: what a checkpoint holds of it."""

    cursor: dict[str, Any]
    num_prompts_sampled: int = 0
    waiting: tuple[Group, ...] = ()
    owed: Owed = ()
    ahead: tuple[Collected, ...] = ()
    counts: StepMetrics = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=random_states, repr=False)


@dataclass(kw_only=True)
class SamplingSession:
    """What sampling and scoring takes. `step` counts batches of rollouts that are done."""

    config: TrainConfig
    console: Console
    loaded: LoadedModel
    prompts: tuple[Prompt, ...]
    cursor: Cursor
    scorer: Scorer
    filters: Filters
    engine: Engine | None  # None: nothing is sampled
    decode: Decode
    recorded: RecordedRollouts | None = None  # in place of sampling
    step: int = 0
    has_told_of_group_of_one: bool = False
    has_told_of_added_rewards: bool = False
    num_prompts_sampled: int = 0  # since the run began; seeds follow from it
    waiting: tuple[Group, ...] = ()  # scored groups beyond what a step needed
    owed: Owed = ()  # to be sampled before the cursor is asked for more
    ahead: tuple[Collected, ...] = ()  # whole batches, whose steps come next
    counts: StepMetrics = field(default_factory=dict)  # of what was scored and dropped since the last step


@dataclass(kw_only=True)
class Session(SamplingSession):
    """The parts of a run that trains."""

    folder: RunFolder
    held_out: tuple[HeldOut, ...]
    objective: PolicyObjective
    trainer: PolicyTrainer
    critic: TorchCritic | None
    guards: GuardMemory
    teachers: Teachers | None = None
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)
    went_back: bool = False  # to an earlier checkpoint than the newest
    is_within_step: bool = False  # between the first and the last update of a batch: no state to resume from
    place: Place = field(default_factory=lambda: Place({}))  # of when `step` was done
    processes: ExitStack = field(default_factory=ExitStack)  # of scorers and of the trainer
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    best: Best | None = None  # of the evaluations so far

    @cached_property
    def prompts_fingerprint(self) -> str:
        """Of all prompts as token ids, with what a scorer sees of them."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(repr((prompt.tokens, prompt.label, dict(prompt.metadata))).encode())
        return digest.hexdigest()

    def close(self) -> None:
        """End the processes of scorers and of the trainer."""
        self.processes.close()

    def publish(self) -> None:
        """The whole models of this process are as what learns, of which other processes may hold parts."""
        self.trainer.publish()
        if self.critic is not None:
            self.critic.publish()

    def weights(self) -> WeightSource:
        """What the engine is given; the engine torch samples from these very tensors, in which adapters stand apart."""
        is_of_model = self.config.engine.kind == "torch"
        return list(self.trainer.model.named_parameters()) if is_of_model else self.trainer.weights()

    def mark_place(self) -> None:
        """A step, or its evaluation, is done: what was collected and drawn until here is what a checkpoint of it holds."""
        self.place = Place(
            self.cursor.state(), self.num_prompts_sampled, self.waiting, self.owed, self.ahead, self.counts
        )


def open_session(config: TrainConfig, console: Console, folder: RunFolder, *, replays: bool = False) -> Session:
    """Load what the config names. What is cheap to get wrong comes first, the model's weights last. `replays`: nothing is
    sampled, and the rollouts are those of the run itself."""
    check_trainer(config.trainer, config.model)
    recorded = None if replays else open_recorded(config, console)
    with ExitStack() as processes:
        check_has_room(config)
        scorer = make_scorer(config.reward)
        processes.callback(scorer.close)
        if config.rollout.num_scorers:
            from strop.runtime.cluster.scorers import ScorersOnNodes

            on_nodes = ScorersOnNodes(config, room_of_run(), tell=console.warn)
            scorer = scorer.spread(on_nodes, on_nodes.take_metrics, on_nodes.close)
            processes.callback(scorer.close)
        of_eval = scorer
        if (
            config.rollout.streaming and config.eval.all_sets
        ):  # one of its own: the other is at work while the run evaluates
            of_eval = make_scorer(config.reward)
            processes.callback(of_eval.close)
        scorers = make_eval_scorers(config, of_eval)
        for of_set in scorers.values():
            processes.callback(of_set.close)
        needs_engine = bool(scorers) or not (replays or recorded is not None)  # to train or to evaluate
        base = open_sampling(config, console, scorer, needs_engine=needs_engine)
        if recorded is not None:
            base.recorded = recorded
            recorded.check(base.loaded.model)
        session = _with_learners(config, base, folder, scorers, processes)
        session.processes = processes.pop_all()
    return session


def _with_learners(
    config: TrainConfig,
    base: SamplingSession,
    folder: RunFolder,
    scorers: Mapping[str, Scorer],
    processes: ExitStack,
) -> Session:
    """The session of a training run, around the part that samples."""
    loaded, console = base.loaded, base.console
    held_out = load_held_out(config, loaded, console, scorers)
    ranks = processes.enter_context(open_ranks(config.trainer, device=loaded.model.device))
    critic = open_critic(config, loaded, ranks, console.note)
    interrupts.check()
    if critic is not None:
        longest = max(base.prompts, key=lambda p: len(p.tokens))
        check_length(
            critic.model.body,
            f"critic: prompt row {longest.row}",
            len(longest.tokens),
            option="rollout.max_response_tokens",
            max_response_tokens=config.rollout.max_response_tokens,
        )
    teachers = open_teachers(config, loaded, base.prompts, console)
    attach_adapters(loaded.model, config.lora, seed=config.seed)  # the critic has its own copy, without them
    if config.rollout.max_off_policy_steps and isinstance(base.engine, TorchEngine):
        own = replace(loaded, model=copy.deepcopy(loaded.model))  # what samples while the trainer changes its own
        base.engine = make_engine(config, own, console)
    objective = PolicyObjective(
        config.algorithm,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    guards = GuardMemory(config)
    session = Session(
        **vars(base),
        folder=folder,
        held_out=held_out,
        objective=objective,
        trainer=ranks.make(
            trainer_class(config.trainer),
            loaded.model,
            config.trainer,
            total_steps=config.num_optimizer_steps,
            max_logprob_gap=config.max_logprob_gap,
            keeps_reference=objective.uses_reference,
            here={"watch": guards.watch},
        ),
        critic=critic,
        guards=guards,
        teachers=teachers,
    )
    session.mark_place()
    return session


def open_sampling(
    config: TrainConfig, console: Console, scorer: Scorer, *, needs_engine: bool = True
) -> SamplingSession:
    """The part of a session that samples and scores, from what the config names."""
    filters = Filters(config.filter, looks_at_parts=config.algorithm.advantage.kind == "gdpo")
    check_has_room(config)
    set_threads(config.trainer.num_threads, num_processes=config.trainer.num_processes)
    check_peft(config.lora)
    check_engine(config.engine)
    interrupts.check()
    loaded = load_model(config.model)
    interrupts.check()
    check_stop_token_ids(loaded, config.rollout.stop_token_ids)
    prompts = _load("data", config.data, config.reward, loaded, console)
    _check_lengths(config, loaded, prompts, "rollout", config.rollout.max_response_tokens)
    _check_tokens_in_flight(config, prompts)
    _warn_of_few_rounds(config, len(prompts), console)
    return SamplingSession(
        config=config,
        console=console,
        loaded=loaded,
        prompts=prompts,
        cursor=make_cursor(prompts, config.data, config.curriculum, seed=config.seed),
        scorer=scorer,
        filters=filters,
        engine=make_engine(config, loaded, console) if needs_engine else None,
        decode=decoder(loaded),
    )


def _warn_of_few_rounds(config: TrainConfig, num_prompts: int, console: Console) -> None:
    """What the number of prompts makes of the options: allowed, since runs are shortened to try them."""
    taken = config.run.num_steps * config.rollout.round_size
    if config.curriculum.kind != "none" and taken <= num_prompts:
        console.warn(
            f"curriculum.kind = {config.curriculum.kind} begins after a first pass over the {num_prompts} prompts, and "
            f"{config.run.num_steps} steps take {taken}: it does not act in this run unless filters ask for more."
        )
    if config.rollout.prompts_per_step > num_prompts:
        console.warn(
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step} is more than the {num_prompts} prompts there are: "
            "a step has some of them more than once."
        )


def make_eval_scorers(config: TrainConfig, of_run: Scorer) -> dict[str, Scorer]:
    """A scorer for each set of held-out prompts, by the set's name: that of the run where a set has no reward of its own."""
    sets = config.eval.all_sets
    return {name: of_run if own.reward is None else make_scorer(own.reward) for name, own in sets.items()}


def load_held_out(
    config: TrainConfig, loaded: LoadedModel, console: Console, scorers: Mapping[str, Scorer]
) -> tuple[HeldOut, ...]:
    """The sets of held-out prompts, each prompt short enough to be answered."""
    found = []
    for name, options in config.eval.all_sets.items():
        table, reward = f"eval.sets.{name}.data" if name else "eval.data", options.reward or config.reward
        prompts = _load(table, options.data, reward, loaded, console)
        limit_table, limit = response_limit(name, config)
        _check_lengths(config, loaded, prompts, limit_table, limit)
        found.append(HeldOut(name, options, reward, prompts, scorers[name]))
    return tuple(found)


def _load(
    table: str, options: DataOptions, reward: RewardOptions, loaded: LoadedModel, console: Console
) -> tuple[Prompt, ...]:
    found = load_prompts(options, loaded.tokenizer, check_label=label_check(reward))
    warn_of_left_out(console, table, found.num_skipped)
    return found.prompts


def warn_of_left_out(console: Console, table: str, num_lines: int) -> None:
    """Say how many broken lines of a file were left out, if any."""
    if num_lines:
        console.warn(f"{table}: {num_lines} broken lines were left out, as skip_bad_lines asks.")


def make_engine(config: TrainConfig, loaded: LoadedModel, console: Console) -> Engine:
    """The engine that `[engine]` names, sampling from the loaded model's weights. What it starts, it starts when it is asked
    for the first sample; `close` ends that."""
    options, model, ids = config.engine, loaded.model, loaded.stop_token_ids
    if isinstance(options, TorchEngineOptions):
        if options.num_replicas:
            from strop.runtime.cluster.replicas import ReplicaEngine

            weights = list(model.named_parameters())
            return ReplicaEngine(config, room_of_run(), weights, stop_token_ids=ids, tell=console.warn)
        return TorchEngine(model, stop_token_ids=ids, **options.of_each)
    from strop.engines.served.process import Served

    on_cpu = next(model.parameters()).device.type == "cpu"
    served = Served(config.model.path, config.model.dtype, on_cpu, config.model.trust_remote_code)
    if isinstance(options, VLLMInProcessOptions):
        from strop.engines.vllm.in_process import VLLMInProcess

        return VLLMInProcess(options, served, WholeWeights(model), stop_token_ids=ids, tell=console.note)
    room, engine, server = room_of_run(), served_engine(options.kind), None
    if room is not None and options.starts_servers:
        from strop.runtime.cluster.servers import ServersOnNodes

        server = ServersOnNodes(config, room)
    return engine(options, served, WholeWeights(model), stop_token_ids=ids, tell=console.warn, server=server)


def decoder(loaded: LoadedModel) -> Decode:
    """Token ids to the text that scorers and people read."""
    return partial(loaded.tokenizer.decode, skip_special_tokens=True)


def _check_lengths(
    config: TrainConfig, loaded: LoadedModel, prompts: tuple[Prompt, ...], table: str, max_response_tokens: int
) -> None:
    """The longest prompt and its response fit the model, and the cache of the sampler."""
    longest = max(prompts, key=lambda p: len(p.tokens))
    check_length(
        loaded.model,
        f"prompt row {longest.row}",
        len(longest.tokens),
        option=f"{table}.max_response_tokens",
        max_response_tokens=max_response_tokens,
    )
    cache = config.engine.max_cache_tokens if isinstance(config.engine, TorchEngineOptions) else None
    needed = len(longest.tokens) + max_response_tokens
    if cache is not None and needed > cache:
        raise ConfigError(
            f"engine.max_cache_tokens must be at least {needed}, got {cache}: prompt row {longest.row} has "
            f"{len(longest.tokens)} tokens, and {table}.max_response_tokens = {max_response_tokens}."
        )


def _check_tokens_in_flight(config: TrainConfig, prompts: tuple[Prompt, ...]) -> None:
    """Every prompt's samples fit under the cap: one that does not would wait for ever."""
    rollout, longest = config.rollout, max(prompts, key=lambda p: len(p.tokens))
    needed = rollout.group_size * (len(longest.tokens) + rollout.max_response_tokens)
    if rollout.max_tokens_in_flight is not None and needed > rollout.max_tokens_in_flight:
        raise ConfigError(
            f"rollout.max_tokens_in_flight must be at least {needed}, got {rollout.max_tokens_in_flight}: the "
            f"{rollout.group_size} samples of prompt row {longest.row} may have {len(longest.tokens)} prompt tokens + "
            f"{rollout.max_response_tokens} response tokens each."
        )


def write_start(session: Session, formula: str) -> None:
    """What the run folder says of a run before its first step."""
    session.folder.write_config(to_toml(session.config))
    session.folder.objective.write_text(formula, encoding="utf-8")
