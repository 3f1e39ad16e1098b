"""Runs the calls of an async scoring function side by side, on an event loop that outlives the step."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any

MAX_WAIT_S = 5.0  # for calls to end that an interrupt has cancelled

Call = Callable[[], Coroutine[Any, Any, Any]]


def run_all(
    calls: Sequence[Call], *, max_concurrent: int, advance: Callable[[int], object] = lambda done: None
) -> list[Any]:
    """What the calls return, in their order; an exception in place of the result of one that raised.

    Scoring happens inside strop's own event loop, and connections that a function keeps outlive a step: so the calls run on
    a loop of their own, in a thread, always the same one. An interrupt cancels them, and they have `MAX_WAIT_S` to end.

    Args:
        calls: each starts one.
        max_concurrent: how many run at once.
        advance: is told how many have ended, from the loop's thread.

    >>> async def double(x):
    ...     return 2 * x
    >>> run_all([lambda: double(1), lambda: double(2)], max_concurrent=2)
    [2, 4]
    """
    ended = threading.Event()

    async def work() -> list[Any]:
        try:
            return await _limited(calls, max_concurrent, advance)
        finally:
            ended.set()

    running = asyncio.run_coroutine_threadsafe(work(), _loop())
    try:
        return running.result()
    except BaseException:  # Ctrl-C, since what a call raises is among the results
        running.cancel()
        ended.wait(MAX_WAIT_S)
        raise


async def _limited(calls: Sequence[Call], max_concurrent: int, advance: Callable[[int], object]) -> list[Any]:
    places, done = asyncio.Semaphore(max_concurrent), 0

    async def one(call: Call) -> Any:
        nonlocal done
        async with places:
            try:
                return await call()
            finally:
                done += 1
                advance(done)

    return await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)


def is_async(function: Callable[..., Any]) -> bool:
    """Does calling it give a coroutine? So do objects whose `__call__` does.

    >>> is_async(len)
    False
    """
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="strop-rewards", daemon=True).start()
    return loop
