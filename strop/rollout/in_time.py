"""A wait for many samples that ends: with all of them, or with an error that says what is missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from strop.types import Prompt, WaitError

T = TypeVar("T")
TELL_AFTER_S = 60.0  # without an end of anything
MAX_END_S = 5.0  # for what is cancelled


async def all_in_time(
    work: Sequence[Coroutine[Any, Any, T]],
    *,
    limit_s: float,
    missing: Callable[[list[int]], str],
    tell: Callable[[str], None],
) -> list[T]:
    """What all of the work returns, in its order.

    Args:
        work: coroutines, which run side by side.
        limit_s: for how long nothing may end.
        missing: says in words what is not there yet, from the places of the work.
        tell: is told so once, where nothing has ended for a minute.

    Raises:
        WaitError: for so long nothing ended. All that is not done is cancelled, and so it is where one raises.
    """
    last, has_told = time.monotonic(), False

    def has_ended(task: asyncio.Task[T]) -> None:
        nonlocal last
        last = time.monotonic()

    tasks = [asyncio.ensure_future(one) for one in work]
    for task in tasks:
        task.add_done_callback(has_ended)
    try:
        while waiting := [place for place, task in enumerate(tasks) if not task.done()]:
            idle_s = time.monotonic() - last
            if idle_s >= limit_s:
                raise WaitError(
                    f"rollout.timeout_s = {limit_s:g} s went by in which the engine finished no prompt: {missing(waiting)}."
                )
            if idle_s >= TELL_AFTER_S and not has_told:
                has_told = True
                tell(
                    f"the engine has finished no prompt for {idle_s:.0f} s: {missing(waiting)}. "
                    f"rollout.timeout_s = {limit_s:g} ends the wait."
                )
            next_look = limit_s if has_told else min(limit_s, TELL_AFTER_S)
            done, _ = await asyncio.wait(tasks, timeout=next_look - idle_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()  # raises what it raised, while others are still at work
        return [task.result() for task in tasks]
    finally:
        await end_tasks(tasks)


async def end_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what is not done, and do not wait for ever for what takes its time about it."""
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    if waiting:
        await asyncio.wait(waiting, timeout=MAX_END_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # looked at, so that asyncio does not speak of it: the first one was raised


def not_there(prompts: Sequence[Prompt], num_samples: int) -> Callable[[list[int]], str]:
    """What is missing of so many samples of each prompt, in words.

    >>> not_there([Prompt(3, (5,), ""), Prompt(4, (5,), ""), Prompt(9, (5,), "")], 8)([1, 2])
    '8 of 24 samples are there, none or not all of prompt rows 4, 9'
    """

    def words(places: list[int]) -> str:
        there = (len(prompts) - len(places)) * num_samples
        rows = [str(prompts[place].row) for place in places]
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        named = ", ".join(rows[:8]) + more
        return f"{there} of {len(prompts) * num_samples} samples are there, none or not all of prompt rows {named}"

    return words
