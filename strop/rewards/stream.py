"""Scoring of groups that come all the time, each handed over as soon as its last rollout is scored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strop.rewards.arrivals import Arrivals
from strop.rewards.reading import Outcome
from strop.types import Group, Rollout

if TYPE_CHECKING:
    from strop.rewards.scorer import Scored

Hear = Callable[
    [int, Outcome], object
]  # is told of each outcome, by the rollout's place among all that came, in any order
AskStream = Callable[[Arrivals, Callable[[int], object], Hear], object]


@dataclass
class _Open:
    """A group whose outcomes are not all there."""

    group: Group
    outcomes: list[Outcome] = field(default_factory=list)
    num_left: int = 0


class Stream:
    """Scores groups side by side, as others are sampled. To be closed, which ends what is not done.

    Args:
        ask: scores what arrives, in other processes. It is called in a thread of its own.
        settle: makes scored rollouts of rollouts and their outcomes.
        take: is given a group and what was scored of it, in the thread of the event loop that this is made in.
        fail: is given there what ends the scoring.
    """

    def __init__(
        self,
        ask: AskStream,
        settle: Callable[[Sequence[Rollout], Iterable[Outcome]], Scored],
        take: Callable[[Group, Scored], object],
        fail: Callable[[BaseException], object],
    ) -> None:
        self._settle, self._take, self._fail, self._arrivals = settle, take, fail, Arrivals()
        self._open: dict[int, tuple[_Open, int]] = {}  # by the places of its rollouts, with which of them that is
        self._num_put, self._is_closed, self._loop = 0, False, asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._score, args=(ask,), name="strop-scoring", daemon=True)
        self._thread.start()

    def put(self, group: Group) -> None:
        """A group is sampled."""
        found = _Open(group, [None] * len(group.rollouts), len(group.rollouts))
        self._open |= {self._num_put + number: (found, number) for number in range(len(group.rollouts))}
        self._num_put += len(group.rollouts)
        self._arrivals.put(group.rollouts)

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        self._arrivals.stop()
        self._thread.join()
        self._arrivals.close()

    def _score(self, ask: AskStream) -> None:
        error: BaseException | None = None
        try:
            ask(self._arrivals, lambda done: None, self._hear)
        except BaseException as raised:  # noqa: BLE001 - handed over
            error = raised
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._end, error)

    def _hear(self, place: int, outcome: Outcome) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._put_outcome, place, outcome)

    def _put_outcome(self, place: int, outcome: Outcome) -> None:
        found, number = self._open.pop(place)
        found.outcomes[number] = outcome
        found.num_left -= 1
        if not found.num_left and not self._is_closed:
            self._hand_over(found)

    def _hand_over(self, found: _Open) -> None:
        try:
            self._take(found.group, self._settle(found.group.rollouts, found.outcomes))
        except BaseException as error:  # noqa: BLE001 - nobody waits for a callback
            self._fail(error)

    def _end(self, error: BaseException | None) -> None:
        """The scorer leaves off: it raised, or a failure ends everything, which settling what is open says."""
        if error is not None:
            self._fail(error)
            return
        for found in {id(found): found for found, _ in self._open.values()}.values():
            self._hand_over(found)
