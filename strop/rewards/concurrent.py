"""Runs the calls of an async scoring function side by side, on an event loop that outlives the step."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any

MAX_WAIT_S = 5.0  # for calls to end that an interrupt has cancelled

Call = Callable[[], Coroutine[Any, Any, Any]]


class Running:
    """Calls that run side by side; those that began earlier have their places first.

    Scoring happens inside strop's own event loop, and connections that a function keeps outlive a step: so the calls run on
    a loop of their own, in a thread, always the same one.

    Args:
        calls: each starts one.
        places: what runs at once shares them.

    >>> async def double(x):
    ...     return 2 * x
    >>> Running([lambda: double(1), lambda: double(2)], asyncio.Semaphore(2)).result()
    [2, 4]
    """

    def __init__(self, calls: Sequence[Call], places: asyncio.Semaphore) -> None:
        self._has_ended = threading.Event()
        self._found = asyncio.run_coroutine_threadsafe(self._work(calls, places), _loop())

    async def _work(self, calls: Sequence[Call], places: asyncio.Semaphore) -> list[Any]:
        try:
            return await _limited(calls, places)
        finally:
            self._has_ended.set()

    def result(self) -> list[Any]:
        """Wait for what the calls return, in their order; an exception in place of the result of one that raised."""
        try:
            return self._found.result()
        except BaseException:  # Ctrl-C, since what a call raises is among the results
            cancel([self])
            raise

    def when_done(self, take: Callable[[list[Any]], object]) -> None:
        """Hand the same over, in the loop's thread, if nobody cancels them before."""
        self._found.add_done_callback(lambda found: None if found.cancelled() else take(found.result()))

    @property
    def is_done(self) -> bool:
        return self._found.done()

    def cancel(self) -> None:
        self._found.cancel()

    def wait(self, limit_s: float) -> None:
        """Until all have ended, also those that were cancelled."""
        self._has_ended.wait(max(0.0, limit_s))


def cancel(running: Sequence[Running]) -> None:
    """Cancel all, which have `MAX_WAIT_S` to end. At once: a place that one leaves must not be taken by the next."""
    until = time.monotonic() + MAX_WAIT_S
    _loop().call_soon_threadsafe(lambda: [one.cancel() for one in running])
    for one in running:
        one.wait(until - time.monotonic())


async def _limited(calls: Sequence[Call], places: asyncio.Semaphore) -> list[Any]:
    async def one(call: Call) -> Any:
        async with places:
            try:
                return await call()
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as ended:
                task = asyncio.current_task()
                if isinstance(ended, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # an interrupt of the run; the others are of the function's own making
                raise as_error(ended) from ended

    return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)


def as_error(ended: BaseException) -> Exception:
    """sys.exit and its like in a scoring function, which must not end the run without a word.

    >>> as_error(SystemExit(3))
    RuntimeError('SystemExit(3), which would have ended the run')
    """
    return RuntimeError(f"{ended!r}, which would have ended the run")


def is_async(function: Callable[..., Any]) -> bool:
    """Does calling it give a coroutine? So do objects whose `__call__` does.

    >>> is_async(len)
    False
    """
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), name="strop-rewards", daemon=True).start()
    return loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    """asyncio ends its loop where a task exits; whoever awaits the task gets the exit too, and the loop must go on for it."""
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
