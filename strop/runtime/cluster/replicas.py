"""Replicas of a sampler on a cluster: rank 0's side of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from strop.config import TorchEngineOptions, TrainConfig
from strop.engines.fit import to_read_twice
from strop.engines.vllm.remote.strop_weights import checksum_of
from strop.runtime.cluster.connection import NO_GPU, why_lost
from strop.runtime.cluster.replica_actor import ReplicaActor, pack
from strop.types import (
    Completion,
    EngineError,
    GenerateRequest,
    Metric,
    StepMetrics,
    StropError,
    WaitError,
    WeightSource,
)

MAX_LOSSES = 3  # of a replica in a row, without a sample in between


@dataclass(eq=False)
class _Replica:
    number: int
    actor: Any
    place: str = "a node of the cluster"
    in_flight: int = 0  # samples
    losses: int = 0  # in a row
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class ReplicaEngine:
    """Samples in replicas, each an actor with the model of its own.

    Weights lie once in Ray's store, as bytes that replicas read without a copy of their own, until the next ones come; a
    checksum of what each replica then holds confirms them. The samples of a prompt stay together and go to the replica with the
    fewest in flight. A replica that is lost is started again and given the newest weights, and is asked again for what it owed.

    Args:
        config: of the run.
        room: its placement group; replicas are in its last bundles.
        weights: what is sampled from until others come.
        stop_token_ids: ids that end a response.
        tell: told of replicas that are lost.
    """

    def __init__(
        self,
        config: TrainConfig,
        room: Any,
        weights: WeightSource,
        *,
        stop_token_ids: frozenset[int],
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._room, self._tell = config, room, tell
        self._weights, self._stop, self.policy_version = to_read_twice(weights), stop_token_ids, 0
        self._limit_s = config.trainer.process_timeout_s
        self._replicas: list[_Replica] = []
        self._newest: tuple[Any, dict[str, tuple[int, ...]], int, str] | None = None
        self._num_restarts, self._opening = 0, asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion per seed, in the order of the seeds."""
        await self._ready()
        return await self._asked("generate", request, num_samples=len(request.seeds))

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of each token after those before it, at temperature 1; 0.0 for the first."""
        await self._ready()
        return await self._asked("logprobs", list(tokens), num_samples=1)

    async def _asked(self, method: str, what: Any, *, num_samples: int) -> Any:
        """What a replica answers; another one is asked where that is lost."""
        from ray.exceptions import RayActorError

        while True:
            replica = min(self._replicas, key=lambda one: one.in_flight)
            actor = replica.actor
            replica.in_flight += num_samples
            try:
                found = await _own_errors(getattr(actor, method).remote(what))
            except RayActorError as error:
                await self._bring_back(replica, actor, error)
            else:
                replica.losses = 0
                return found
            finally:
                replica.in_flight -= num_samples

    async def update_weights(self, weights: WeightSource, policy_version: int) -> StepMetrics:
        """Give all replicas these weights.

        Returns:
            What was moved, and how long that took.

        Raises:
            ModelError: they are not those of the model.
        """
        import ray

        began, weights = time.monotonic(), to_read_twice(weights)
        self._open()
        with torch.no_grad():
            shapes = {name: tuple(tensor.shape) for name, tensor in weights}
            packed = {name: pack(tensor) for name, tensor in weights}
            checksum = checksum_of((name, tensor.detach().cpu()) for name, tensor in weights)
        num_bytes = sum(array.nbytes for array in packed.values())
        self._newest = (await asyncio.to_thread(ray.put, packed), shapes, policy_version, checksum)
        async with asyncio.TaskGroup() as all_of_them:
            for replica in self._replicas:
                all_of_them.create_task(self._give_or_bring_back(replica))
        self.policy_version = policy_version
        restarts, self._num_restarts = self._num_restarts, 0
        return {
            "weights_bytes": Metric("sum", num_bytes * len(self._replicas)),
            "seconds/weights": Metric("sum", time.monotonic() - began),
            "engine_restarts": Metric("sum", restarts),
        }

    async def rest(self) -> None:
        """Replicas have devices of their own."""

    async def close(self) -> None:
        """End the replicas."""
        import ray

        replicas, self._replicas, self._newest = self._replicas, [], None
        for replica in replicas:
            ray.kill(replica.actor)

    async def _ready(self) -> None:
        """Replicas are there and hold weights of this run."""
        if self._newest is None:
            async with self._opening:
                if self._newest is None:
                    await self.update_weights(self._weights, self.policy_version)

    def _open(self) -> None:
        if not self._replicas:
            options = self._config.engine
            assert isinstance(options, TorchEngineOptions)
            self._replicas = [_Replica(number, self._started(number)) for number in range(options.num_replicas)]

    def _started(self, number: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

        config = self._config
        place = config.trainer.num_processes + number
        bundle = self._room.bundle_specs[place]
        kind = ray.remote(ReplicaActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=In(self._room, placement_group_bundle_index=place),
        )
        return kind.remote(
            number,
            config.model,
            stop_token_ids=self._stop,
            engine=config.engine.of_each,
            num_threads=int(bundle["CPU"]),
            folder=os.getcwd(),
            variables={} if bundle.get("GPU") else NO_GPU,
        )

    async def _give(self, replica: _Replica) -> None:
        assert self._newest is not None
        packed, shapes, version, checksum = self._newest
        try:
            async with asyncio.timeout(self._limit_s):
                replica.place = await _own_errors(replica.actor.place.remote())
                found = await _own_errors(replica.actor.take.remote(packed, shapes, version))
        except TimeoutError:
            raise WaitError(
                f"replica {replica.number} at {replica.place} did not take weights within trainer.process_timeout_s = "
                f"{self._limit_s:g} s."
            ) from None
        if found != checksum:
            raise EngineError(f"replica {replica.number} at {replica.place} holds other weights than it was given.")

    async def _give_or_bring_back(self, replica: _Replica) -> None:
        from ray.exceptions import RayActorError

        actor = replica.actor
        try:
            await self._give(replica)
        except RayActorError as error:
            await self._bring_back(replica, actor, error)

    async def _bring_back(self, replica: _Replica, lost: Any, error: BaseException) -> None:
        """Make a lost replica one that holds the newest weights; whoever comes second waits for the first."""
        import ray
        from ray.exceptions import RayActorError

        async with replica.changing:
            while replica.actor is lost:
                name, reason = f"replica {replica.number} at {replica.place}", why_lost(error)
                if replica.losses == MAX_LOSSES:
                    raise EngineError(f"{name} was lost {MAX_LOSSES + 1} times in a row: {reason}.")
                replica.losses += 1
                self._tell(f"{name} was lost: {reason}. It starts again.")
                ray.kill(lost)
                replica.actor = self._started(replica.number)
                try:
                    await self._give(replica)
                except RayActorError as another:
                    lost, error = replica.actor, another
                    continue
                self._num_restarts += 1


async def _own_errors(ref: Any) -> Any:
    """The value; an error that strop raised on purpose comes as it was raised."""
    from ray.exceptions import RayTaskError

    try:
        return await ref
    except RayTaskError as error:
        if isinstance(error.cause, StropError):
            raise error.cause from None
        raise
