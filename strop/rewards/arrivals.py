"""Rollouts that come one group after the other, for a scorer that begins before the last of them is sampled."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from strop.types import Rollout


class StoppedError(Exception):
    """Nobody wants the scores any more."""


class Arrivals:
    """A queue of rollouts between a thread that samples and one that scores. To be closed.

    >>> with coming([]) as arrivals:
    ...     arrivals.take(), arrivals.has_ended
    ([], True)
    """

    def __init__(self) -> None:
        self._lock, self._new, self._all_are_there, self._is_stopped = threading.Lock(), list[Rollout](), False, False
        self.pipe, self._wakes = os.pipe()  # there is something to read from `pipe` where something has changed
        for end in (self.pipe, self._wakes):
            os.set_blocking(end, False)

    def put(self, rollouts: Sequence[Rollout]) -> None:
        """More of them."""
        with self._lock:
            self._new += rollouts
        self.wake()

    def end(self) -> None:
        """These were all."""
        self._all_are_there = True
        self.wake()

    def stop(self) -> None:
        """Whoever scores is to leave off: `take` raises from now on."""
        self._is_stopped = True
        self.wake()

    @property
    def has_ended(self) -> bool:
        """All were put, and all were taken."""
        with self._lock:
            return self._all_are_there and not self._new

    def take(self) -> list[Rollout]:
        """Those that came since the last time; does not wait.

        Raises:
            StoppedError: nobody wants their scores.
        """
        self._hear()
        if self._is_stopped:
            raise StoppedError
        with self._lock:
            new, self._new = self._new, []
        return new

    def wait(self, limit_s: float | None = None) -> None:
        """Until something changes, or for so long."""
        poll = select.poll()
        poll.register(self.pipe, select.POLLIN)
        poll.poll(None if limit_s is None else limit_s * 1000)

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self._wakes)

    def wake(self) -> None:
        """Whoever waits looks again."""
        try:
            os.write(self._wakes, b"!")
        except BlockingIOError:  # full of them: whoever waits is awake
            return

    def _hear(self) -> None:
        try:
            while os.read(self.pipe, 4096):
                pass
        except BlockingIOError:
            return


@contextmanager
def coming(rollouts: Sequence[Rollout] | Arrivals) -> Iterator[Arrivals]:
    """Rollouts that are all there, as ones that come; those that come, as they are."""
    if isinstance(rollouts, Arrivals):
        yield rollouts
        return
    arrivals = Arrivals()
    try:
        arrivals.put(rollouts)
        arrivals.end()
        yield arrivals
    finally:
        arrivals.close()
