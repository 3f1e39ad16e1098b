"""Scoring spread over a cluster: rank 0's side of it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from strop.config import TrainConfig
from strop.rewards.reading import Outcome
from strop.runtime.cluster.connection import why_lost
from strop.runtime.cluster.scorer_actor import ScorerActor
from strop.types import RewardError, Rollout, StepMetrics, StropError, merge_metrics

_TASKS_OF_AN_ACTOR = 4  # of one scoring, so that a slow one holds nobody up
MAX_LOSSES = 3  # of actors, in a scoring
_LOOK_S = 0.5  # in which Ctrl-C is heard


class ScorersOnNodes:
    """Asks actors for the outcomes of rollouts, and is what a `Scorer` asks.

    Rollouts are handed out in parts of like size to whoever is free. An actor that is lost is started again, and its part is
    scored again: the random numbers of a scorer follow from the rollout, wherever that is scored.

    Args:
        config: of the run.
        room: its placement group; the scorers are in the last bundles.
        tell: told of actors that are lost.
    """

    def __init__(self, config: TrainConfig, room: Any, *, tell: Callable[[str], None]) -> None:
        self._config, self._room, self._tell = config, room, tell
        self._metrics: list[StepMetrics] = []
        self._actors = [self._started(number) for number in range(config.rollout.num_scorers)]

    def __call__(self, rollouts: Sequence[Rollout], advance: Callable[[int], object]) -> list[Outcome]:
        """An outcome for each rollout, in their order.

        Raises:
            RewardError: the function breaks its contract, or actors were lost too often.
        """
        import ray
        from ray.exceptions import RayActorError

        size = max(1, -(-len(rollouts) // (len(self._actors) * _TASKS_OF_AN_ACTOR)))
        waiting = deque(range(0, len(rollouts), size))
        found: dict[int, list[Outcome]] = {}
        free, asked, losses = deque(range(len(self._actors))), dict[Any, tuple[int, int]](), 0
        while waiting or asked:
            while waiting and free:
                number, start = free.popleft(), waiting.popleft()
                ref = self._actors[number].outcomes.remote(list(rollouts[start : start + size]))
                asked[ref] = (number, start)
            for ref in ray.wait(list(asked), timeout=_LOOK_S)[0]:
                number, start = asked.pop(ref)
                try:
                    found[start], metrics = _own_errors(ref)
                    self._metrics.append(metrics)
                except RayActorError as error:
                    losses += 1
                    self._replace(number, error, losses)
                    waiting.appendleft(start)
                free.append(number)
            advance(sum(map(len, found.values())))
        return [outcome for start in sorted(found) for outcome in found[start]]

    def take_metrics(self) -> StepMetrics:
        """What the scorers counted since the last time."""
        found, self._metrics = self._metrics, []
        return merge_metrics(found)

    def close(self) -> None:
        """End the actors and what they hold."""
        import ray
        from ray.exceptions import RayError

        for actor in self._actors:
            with suppress(RayError):
                ray.get(actor.close.remote(), timeout=self._config.trainer.process_timeout_s)
            ray.kill(actor)
        self._actors = []

    def _replace(self, number: int, error: BaseException, losses: int) -> None:
        if losses > MAX_LOSSES:
            raise RewardError(f"scorers of the cluster were lost {losses} times in one scoring: {why_lost(error)}.")
        self._tell(f"scorer {number} was lost: {why_lost(error)}. It starts again.")
        self._actors[number] = self._started(number)

    def _started(self, number: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

        index = len(self._room.bundle_specs) - self._config.rollout.num_scorers + number
        where = In(self._room, placement_group_bundle_index=index)
        kind = ray.remote(ScorerActor).options(num_cpus=1, scheduling_strategy=where)
        return kind.remote(number, self._config.reward, os.getcwd())


def _own_errors(ref: Any) -> Any:
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, StropError):
            raise error.cause from None
        raise
