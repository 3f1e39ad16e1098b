"""A run on a Ray cluster as its driver sees it: ranks are started as actors, watched, and started again when one is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from strop import interrupts
from strop.config import ServedEngineOptions, SFTConfig, TorchEngineOptions, TrainConfig
from strop.observe.console import Console, QuietConsole
from strop.runtime.cluster.connection import LOCAL, NO_GPU, Bundle, connected, placed, why_lost
from strop.runtime.cluster.rank_actor import Outcome, Place, RankActor, Task
from strop.runtime.rank import LOOPBACK, is_launched
from strop.types import ConfigError, LostRankError, UserError

MAX_LOSSES = 3  # in a row, without a new checkpoint in between
_LOOK_S = 0.5  # between two looks at whether somebody asked to stop
_KNOWN_S = 5.0  # for Ray to know which actor has died
_SETTLE_S = 15.0  # for rank 0 to end by itself, with what it writes, once another rank is lost


def run_on_cluster(
    address: str,
    work: Callable[..., Any],
    config: TrainConfig | SFTConfig,
    *,
    resume: bool | str = False,
    allow_change: Sequence[str] = (),
    console: Console | None = None,
) -> Any:
    """Run `strop.train` or `strop.sft` with each of its ranks as an actor of a Ray cluster.

    The ranks are those of several processes: rank 0 runs the loop and writes the run folder, wherever it is. When an actor is
    lost all ranks start again and go on from the newest checkpoint, bit for bit as if nothing had been lost.

    Args:
        address: local (a cluster of this machine that ends with the run), auto, HOST:PORT or ray://HOST:PORT.
        work: strop.train or strop.sft.
        config: of the run; `trainer.num_processes` is the number of actors.
        resume, allow_change: as of `work`.
        console: told of what happens to actors. What they print comes through Ray.

    Returns:
        What `work` returns.

    Raises:
        UserError: there is no such cluster, or what `work` raises of it.
        WaitError: the cluster has no room for the actors.
        LostRankError: actors were lost too often.
    """
    if is_launched():
        raise UserError("--cluster must be left out where a launcher starts the ranks: Ray starts them itself.")
    size, cpus = config.trainer.num_processes, config.trainer.num_threads or 1
    shares = _shares(config)
    num_samplers, gpus_each = (0, 0) if shares else _samplers(config)
    num_scorers = config.rollout.num_scorers if isinstance(config, TrainConfig) else 0
    with connected(address, num_cpus=(size + num_samplers) * cpus + num_scorers) as ray:
        has_gpus = _wants_gpus(ray, config, size + num_samplers * gpus_each)
        rank: Bundle = {"CPU": cpus, **({"GPU": 1} if has_gpus else {})}
        sampler: Bundle = {"CPU": cpus, **({"GPU": gpus_each} if has_gpus else {})}
        task = Task(work, config, resume, allow_change, os.getcwd(), reads_files=address != LOCAL)
        rank_takes = rank | {"GPU": rank.get("GPU", 0) / 2} if shares else rank
        bundles = [rank] * size + [sampler] * num_samplers + [{"CPU": 1.0}] * num_scorers
        with placed(ray, bundles, timeout_s=config.trainer.process_timeout_s) as room:
            return _Driver(ray, room, rank_takes, task, console or QuietConsole()).run()


def _shares(config: TrainConfig | SFTConfig) -> bool:
    """True where servers that sleep while the ranks work are in the ranks' places: each takes half of a GPU, as Ray counts.

    Raises:
        ConfigError: a server needs several GPUs, and a rank has one.
    """
    engine = config.engine if isinstance(config, TrainConfig) else None
    if not isinstance(engine, ServedEngineOptions) or not engine.starts_servers or not engine.sleep:
        return False
    if engine.gpus_per_server > 1:
        raise ConfigError(
            f"engine.sleep must be false on a cluster with servers of {engine.gpus_per_server} GPUs: they would share those of "
            "the ranks, which have one each."
        )
    if engine.num_servers > config.trainer.num_processes:
        raise ConfigError(
            f"engine.num_servers must be at most trainer.num_processes = {config.trainer.num_processes} with engine.sleep on a "
            f"cluster, got {engine.num_servers}: each shares the place of a rank."
        )
    return True


def _samplers(config: TrainConfig | SFTConfig) -> tuple[int, int]:
    """Actors beside the ranks, and GPUs of each; where there are none, rank 0 samples."""
    engine = config.engine if isinstance(config, TrainConfig) else None
    if isinstance(engine, TorchEngineOptions):
        return engine.num_replicas, 1
    if isinstance(engine, ServedEngineOptions) and engine.starts_servers:
        return engine.num_servers, engine.gpus_per_server
    return 0, 1


def _wants_gpus(ray: Any, config: TrainConfig | SFTConfig, wanted: int) -> bool:
    """True unless the config says CPU, or leaves it open and the cluster has fewer than wanted. GPUs: not run in CI."""
    device = config.model.device
    return ray.cluster_resources().get("GPU", 0) >= wanted if device == "auto" else device.startswith("cuda")


class _Driver:
    """The actors of a run, for as many attempts as it takes."""

    def __init__(self, ray: Any, room: Any, bundle: Bundle, task: Task, console: Console) -> None:
        self._ray, self._room, self._bundle, self._task, self._console = ray, room, bundle, task, console
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._losses = 0  # in a row
        self._before: str | None = None  # the newest checkpoint before the run began
        self._reached = ""  # that of the last attempt
        if not task.config.run.checkpoint_every_steps:
            console.warn(
                "run.checkpoint_every_steps = 0: should an actor be lost, the run begins again at its first step."
            )

    def run(self) -> Any:
        """What the work returns, once all of its steps are made."""
        with interrupts.stop_flag() as stop:
            while True:
                try:
                    outcome = self._attempt(stop)
                except LostRankError as error:
                    self._losses += 1
                    if stop.is_set:  # who asked to stop is not kept by starting anew
                        self._console.warn(str(error))
                        raise KeyboardInterrupt from error
                    if self._losses > MAX_LOSSES:
                        raise
                    self._console.warn(f"{error} All ranks start again.")
                    continue
                finally:
                    self._end()
                if outcome.error is not None:
                    raise outcome.error
                return outcome.result

    def _attempt(self, stop: interrupts.StopFlag) -> Outcome:
        """The work, from where it can begin to its end or to the loss of an actor."""
        self._start()
        newest = self._asked(0, "newest_checkpoint", str(self._task.config.folder))
        if self._before is None:
            self._before = newest
        if newest != self._reached:
            self._losses, self._reached = min(self._losses, 1), newest
        task, variables = self._task_from(newest), self._variables()
        waiting = {
            actor.run.remote(mine, task): rank
            for rank, (actor, mine) in enumerate(zip(self._actors, variables, strict=True))
        }
        return self._watch(waiting, stop)

    def _start(self) -> None:
        """An actor for each rank, each in its own part of the room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

        kind, size = self._ray.remote(RankActor), self._task.config.trainer.num_processes
        resources = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        for rank in range(size):
            part = In(self._room, placement_group_bundle_index=rank)
            self._actors.append(kind.options(scheduling_strategy=part, **resources).remote(rank))
        self._places = [self._asked(rank, "place", self._task.folder) for rank in range(size)]
        where = ", ".join(f"rank {rank} at {self._at(rank)}" for rank in range(size))
        self._console.note(f"ranks as actors: {where}")

    def _at(self, rank: int) -> str:
        place = self._places[rank] if rank < len(self._places) else None
        return f"{place.host} (process {place.pid})" if place is not None else "a node of the cluster"

    def _asked(self, rank: int, method: str, *args: Any) -> Any:
        """What an actor answers at once."""
        limit_s = self._task.config.trainer.process_timeout_s
        try:
            return self._ray.get(getattr(self._actors[rank], method).remote(*args), timeout=limit_s)
        except self._ray.exceptions.RayActorError as error:
            raise self._lost(rank, error) from error
        except self._ray.exceptions.GetTimeoutError as error:
            raise LostRankError(
                f"rank {rank} did not come up within trainer.process_timeout_s = {limit_s:g} s."
            ) from error

    def _lost(self, rank: int, error: BaseException) -> LostRankError:
        return LostRankError(f"rank {rank} at {self._at(rank)} was lost: {why_lost(error)}. The step was not made.")

    def _task_from(self, newest: str) -> Task:
        """What is to be done, given the newest checkpoint in the run folder: that of this run is gone on from."""
        task, config = self._task, self._task.config
        has_own = newest not in ("", self._before)
        if has_own:
            return replace(task, config=_with_overwrite(config, False), resume="newest")
        if self._losses and task.resume is False:  # what is in the folder is of the attempt before
            return replace(task, config=_with_overwrite(config, True))
        return task

    def _variables(self) -> list[dict[str, str]]:
        """What a launcher would set in each rank's environment."""
        hosts, nodes = [p.host for p in self._places], [p.node for p in self._places]
        master = LOOPBACK if len(set(hosts)) == 1 else hosts[0]
        common = {"WORLD_SIZE": len(nodes), "MASTER_ADDR": master, "MASTER_PORT": self._places[0].port}
        if not self._bundle.get("GPU"):
            common |= NO_GPU
        # An actor sees its own GPU alone, whose number then is 0.
        own = (
            {"RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": nodes.count(node)} for rank, node in enumerate(nodes)
        )
        return [{name: str(value) for name, value in (common | mine).items()} for mine in own]

    def _watch(self, waiting: dict[Any, int], stop: interrupts.StopFlag) -> Outcome:
        """Wait for rank 0, and for whoever is lost before it ends."""
        lost: LostRankError | None = None
        until, was_told = float("inf"), False
        while time.monotonic() < until:
            if stop.is_set and not was_told:
                self._ask_to_stop()
                was_told = True
            ready, _ = self._ray.wait(list(waiting), timeout=_LOOK_S)
            for ref in ready:
                rank = waiting.pop(ref)
                try:
                    outcome = self._ray.get(ref)
                except self._ray.exceptions.RayActorError as error:
                    lost = lost or self._lost(rank, error)
                    until = min(until, time.monotonic() + (_SETTLE_S if rank else 0.0))
                    continue
                if rank == 0:
                    if isinstance(outcome.error, LostRankError) and lost is None:
                        lost = self._found(waiting) or outcome.error
                    if lost is None or outcome.error is None:
                        return outcome
                    raise lost
        assert lost is not None
        raise lost

    def _found(self, waiting: dict[Any, int]) -> LostRankError | None:
        """Which actor it was that rank 0 misses, as soon as Ray knows."""
        ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=_KNOWN_S) if waiting else ([], [])
        for ref in ready:
            try:
                self._ray.get(ref)
            except self._ray.exceptions.RayActorError as error:
                return self._lost(waiting[ref], error)
        return None

    def _ask_to_stop(self) -> None:
        """Rank 0 ends after its step, as if it had been asked on its own machine."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        place = self._places[0]
        send = self._ray.remote(_send).options(num_cpus=0, scheduling_strategy=On(place.node, soft=False))
        send.remote(place.pid, signal.SIGTERM)

    def _end(self) -> None:
        actors, self._actors, self._places = self._actors, [], []
        for actor in actors:
            self._ray.kill(actor)


def _send(pid: int, number: int) -> None:
    os.kill(pid, number)


def _with_overwrite(config: Any, overwrite: bool) -> Any:
    return config.model_copy(update={"run": config.run.model_copy(update={"overwrite": overwrite})})
