"""Batches that are sampled ahead of their turn, each by the weights of one step: which step follows from its number alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from strop.rollout import end_tasks
from strop.runtime.beside import beside
from strop.runtime.collect import collect, staleness
from strop.runtime.collectors import AsideConsole, give_weights, sampling_part
from strop.runtime.session import Collected, Place, Session
from strop.types import Metric, Rollout, StepMetrics, WeightSource, merge_metrics

T = TypeVar("T")


@dataclass
class _Offer:
    """Weights as they are after a step."""

    step: int
    version: int
    weights: WeightSource
    is_live: bool = True  # the trainer's own, which the next step changes


class Lockstep:
    """Works ahead by K = max_off_policy_steps // updates_per_batch batches.

    Batch n is sampled by the weights of after step n - 1 - K, the first ones by those that the run begins with, and trained in
    step n. So what is sampled depends on no clock: a run is the same each time, and so is one that goes on from a checkpoint,
    which holds the batches that are ahead. One batch is collected at a time, in the run's thread, with weights of the engine's
    own; the step is made in a thread beside it.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._ahead = session, sampling_part(session)
        self._batches_ahead, self._num_steps = session.config.batches_ahead, session.config.run.num_steps
        self._done = deque(session.ahead)
        self._begun: Place | None = None  # where the batch that is being collected began
        self._offers: deque[_Offer] = deque()
        self._first = self._given = self._made = (
            session.step
        )  # steps: of the first weights, the engine's, the newest ones
        self._is_held, self._idle_s = False, 0.0
        self._giving, self._wake, self._news = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._parts: list[StepMetrics] = []  # of weights that the engine was given, for the next batch
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await give_weights(self._session)
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(lambda task: self._news.set())

    async def take(self) -> tuple[list[Rollout], StepMetrics]:
        self._is_held = False
        self._wake.set()
        try:
            with self._session.console.phase("wait", 0, is_idle=True):
                await self._until(lambda: bool(self._done))
        except asyncio.CancelledError:
            self.mark_place()
            raise
        batch = self._done.popleft()
        await self._keep_offers()
        queue = {"queue/ready_groups": Metric("sum", self._num_groups()), "seconds/sampler_idle": self._take_idle()}
        return list(batch.rollouts), batch.metrics | queue | staleness(batch.rollouts, self._session.trainer.num_steps)

    async def train(self, make_step: Callable[[], T]) -> T:
        return await beside(make_step)

    async def share(self, *, holds: bool) -> StepMetrics:
        session = self._session
        if session.guards.wants_checkpoint:
            return await self.restart()
        if holds:  # what was begun is of older weights: it comes first
            whole = min(session.step + self._batches_ahead, self._num_steps)
            await self._until(lambda: self._ahead.step >= whole or self._has_ended)
        session.publish()
        self._offers.append(_Offer(session.step, session.trainer.num_steps, session.weights()))
        self._made, self._is_held = session.step, holds
        if holds:
            await self._give(session.step)
        self._wake.set()
        await asyncio.sleep(
            0
        )  # a collector that waits for these weights begins to take them; a cancelled run hears of it
        return {}

    async def restart(self) -> StepMetrics:
        await self.close()
        session = self._session
        self._ahead.step = self._first = self._given = self._made = session.step
        self._done.clear()
        self._offers.clear()
        self._begun, self._is_held = None, False
        self._ahead.waiting = self._ahead.owed = ()
        await self.start()
        return {}

    def mark_place(self) -> None:
        """A batch that is not whole is sampled again: the place is where it began."""
        ahead = self._ahead
        place = self._begun or Place(ahead.cursor.state(), ahead.num_prompts_sampled, ahead.waiting, ahead.owed)
        self._session.place = replace(place, ahead=tuple(self._done))

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    async def _work(self) -> None:
        while self._ahead.step < self._num_steps:
            wanted = max(self._ahead.step - self._batches_ahead, self._first)
            await self._until_made(wanted)
            await self._give(wanted)
            ahead = self._ahead
            self._begun = Place(ahead.cursor.state(), ahead.num_prompts_sampled, ahead.waiting, ahead.owed)
            rollouts, metrics = await collect(ahead)
            self._begun = None
            ahead.step += 1
            self._done.append(Collected(tuple(rollouts), merge_metrics([metrics, *self._take_parts()])))
            self._news.set()

    def _take_parts(self) -> list[StepMetrics]:
        assert isinstance(self._ahead.console, AsideConsole)
        parts, self._parts = self._parts, []
        return [*parts, self._ahead.console.take_seconds("sample", "score")]

    async def _until_made(self, step: int) -> None:
        """Until the weights of after a step are there to be sampled by."""
        began = asyncio.get_running_loop().time()
        while self._is_held or self._made < step:
            self._wake.clear()
            await self._wake.wait()
        self._idle_s += asyncio.get_running_loop().time() - began

    async def _give(self, step: int) -> None:
        """Have the engine sample by the weights of after a step."""
        async with self._giving:
            if self._given >= step:
                return
            offer = self._offers.popleft()
            while offer.step < step:
                offer = self._offers.popleft()
            assert self._session.engine is not None
            self._parts.append(await self._session.engine.update_weights(offer.weights, offer.version))
            self._given = step

    async def _keep_offers(self) -> None:
        """The trainer is about to change its weights: of those that the engine is yet to take there must be copies."""
        async with self._giving:
            for offer in self._offers:
                if offer.is_live:
                    offer.weights = [(name, tensor.detach().clone()) for name, tensor in offer.weights]
                    offer.is_live = False

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something of the collector's; what ended it is raised."""
        while not is_so():
            if self._task is not None and self._task.done():
                self._task.result()
            self._news.clear()
            await self._news.wait()

    @property
    def _has_ended(self) -> bool:
        return self._task is not None and self._task.done()

    def _num_groups(self) -> int:
        return sum(len({rollout.group_id for rollout in batch.rollouts}) for batch in self._done)

    def _take_idle(self) -> Metric:
        found, self._idle_s = self._idle_s, 0.0
        return Metric("sum", found)
