"""Scoring that begins while other rollouts are still sampled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from strop.rewards.arrivals import Arrivals
from strop.rewards.reading import Outcome
from strop.rewards.stream import Hear
from strop.types import Rollout

if TYPE_CHECKING:
    from strop.rewards.scorer import Scored


class AskAhead(Protocol):
    """Scores what arrives, and returns the outcomes in the order of their rollouts. Where `hear` is told of each when it is
    there, nothing is kept or returned."""

    def __call__(
        self, rollouts: Arrivals, advance: Callable[[int], object], hear: Hear | None = None
    ) -> Iterable[Outcome]: ...


class Ahead:
    """Scores groups in the order of their places, whichever is sampled first: the scorer sees the rollouts that it would see
    if all were there, one after the other. To be closed, which ends what is not done.

    Args:
        ask: scores what arrives, in other processes. It is called in a thread of its own.
        settle: makes scored rollouts of rollouts and their outcomes.
        advance: is told how many rollouts are scored, once all are sampled.
    """

    def __init__(
        self,
        ask: AskAhead,
        settle: Callable[[Sequence[Rollout], Iterable[Outcome]], Scored],
        advance: Callable[[int], object],
    ) -> None:
        self._settle, self._advance, self._arrivals = settle, advance, Arrivals()
        self._early: dict[int, Sequence[Rollout]] = {}  # whose turn has not come, by their places
        self._given: list[Rollout] = []
        self._next_place, self._all_are_there = 0, False
        self._outcomes: Future[Iterable[Outcome]] = Future()
        self._thread = threading.Thread(target=self._score, args=(ask,), name="strop-scoring", daemon=True)
        self._thread.start()

    def put(self, place: int, rollouts: Sequence[Rollout]) -> None:
        """A group is sampled.

        Raises:
            RewardError: a group before it has failed, and failures end the run.
        """
        self._early[place] = rollouts
        while self._next_place in self._early:
            turn = self._early.pop(self._next_place)
            self._next_place += 1
            self._given += turn
            self._arrivals.put(turn)
        if self._outcomes.done():  # before all are there: something went wrong
            self._settle(self._given, self._outcomes.result())

    async def scored(self) -> Scored:
        """All that was put, with rewards.

        Raises:
            RewardError: as the scorer's own call would.
        """
        self._all_are_there = True
        self._arrivals.end()
        loop, have_ended = asyncio.get_running_loop(), asyncio.Event()
        self._outcomes.add_done_callback(lambda found: loop.call_soon_threadsafe(have_ended.set))
        await have_ended.wait()
        return self._settle(self._given, self._outcomes.result())

    def close(self) -> None:
        """End it."""
        self._arrivals.stop()
        self._thread.join()
        self._arrivals.close()

    def _score(self, ask: AskAhead) -> None:
        try:
            found = ask(self._arrivals, self._tell)
        except BaseException as error:  # noqa: BLE001 - raised again where the outcomes are asked for
            self._outcomes.set_exception(error)
        else:
            self._outcomes.set_result(found)

    def _tell(self, done: int) -> None:
        if self._all_are_there:
            self._advance(done)
