"""Where the loop gets its rollouts from: collected between two steps, or ahead of them while others are trained on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Protocol, TypeVar

from strop.observe.console import Console, QuietConsole
from strop.runtime.collect import collect
from strop.runtime.session import SamplingSession, Session
from strop.types import Metric, Rollout, StepMetrics

T = TypeVar("T")


class Collector(Protocol):
    """Rollouts for one step after the other, and the weights that they are sampled by."""

    async def start(self) -> None:
        """Before the first step."""
        ...

    async def take(self) -> tuple[list[Rollout], StepMetrics]:
        """The scored rollouts of the next step, and what they say as metrics."""
        ...

    async def train(self, make_step: Callable[[], T]) -> T:
        """Make the step, with whatever goes on meanwhile."""
        ...

    async def share(self, *, holds: bool) -> StepMetrics:
        """A step is made: what is sampled from now on, or from where `Collector` says, is by its weights.

        Args:
            holds: sample by these weights already, and begin nothing until the next `take`: the model is about to be evaluated,
                or a checkpoint to be written.

        Returns:
            What carrying the weights took.
        """
        ...

    async def restart(self) -> StepMetrics:
        """The run went back: what was sampled and not trained on is forgotten, and the weights are others."""
        ...

    def mark_place(self) -> None:
        """What a checkpoint of the step that is done holds of collecting: `session.place`."""
        ...

    async def close(self) -> None:
        """End what is in flight."""
        ...


@asynccontextmanager
async def collecting(session: Session) -> AsyncIterator[Collector]:
    """The collector that the options ask for, at work."""
    collector = _collector(session)
    try:
        await collector.start()
        yield collector
    finally:
        await collector.close()


def _collector(session: Session) -> Collector:
    options = session.config.rollout
    if options.max_off_policy_steps == 0:
        return InTurn(session)
    if options.streaming:
        from strop.runtime.streaming import Streaming

        return Streaming(session)
    from strop.runtime.lockstep import Lockstep

    return Lockstep(session)


class InTurn:
    """Collects when a step asks for it; sampling and training take turns."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def start(self) -> None:
        """The engine holds the trainer's weights, or is given them before its first sample."""

    async def take(self) -> tuple[list[Rollout], StepMetrics]:
        batch = taken_before(self._session)
        return await collect(self._session) if batch is None else batch

    async def train(self, make_step: Callable[[], T]) -> T:
        if self._session.engine is not None:
            await self._session.engine.rest()
        return make_step()

    async def share(self, *, holds: bool) -> StepMetrics:
        return await give_weights(self._session)

    async def restart(self) -> StepMetrics:
        return await give_weights(self._session)

    def mark_place(self) -> None:
        self._session.mark_place()

    async def close(self) -> None:
        """Nothing is in flight."""


async def give_weights(session: Session) -> StepMetrics:
    """What is sampled from, and written, is what was learned until now; what it took to give that to an engine."""
    session.publish()
    if session.engine is None:
        return {}
    return await session.engine.update_weights(session.weights(), session.trainer.num_steps)


def taken_before(session: SamplingSession) -> tuple[list[Rollout], StepMetrics] | None:
    """The next of the batches that a checkpoint held, if there is one."""
    if not session.ahead:
        return None
    batch, *rest = session.ahead
    session.ahead = tuple(rest)
    return list(batch.rollouts), batch.metrics


def sampling_part(session: Session) -> SamplingSession:
    """A session for what samples ahead: it counts batches for itself, and times phases that overlap with those of the
    trainer."""
    shared = {field.name: getattr(session, field.name) for field in fields(SamplingSession)}
    console = AsideConsole(session.console)
    return SamplingSession(**{**shared, "console": console, "step": session.step + len(session.ahead), "ahead": ()})


class AsideConsole(QuietConsole):
    """Times phases and shows none of them; what is said goes to the run's console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def note(self, text: str) -> None:
        self._console.note(text)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def take_seconds(self, *names: str) -> StepMetrics:
        """How long each phase took since the last time."""
        found, self.phase_seconds = self.phase_seconds, {}
        return {f"seconds/{name}": Metric("sum", found.get(name, 0.0)) for name in names}
