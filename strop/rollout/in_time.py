"""A wait for many samples that ends: with all of them, or with an error that says what is missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from strop.types import Prompt, WaitError

T = TypeVar("T")
TELL_AFTER_S = 60.0  # without an end of anything


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

    async def watched(one: Coroutine[Any, Any, T]) -> T:
        nonlocal last
        found = await one
        last = time.monotonic()
        return found

    tasks = [asyncio.ensure_future(watched(one)) for one in work]
    everything = asyncio.gather(*tasks)
    try:
        while not everything.done():
            idle_s = time.monotonic() - last
            words = lambda: missing([place for place, task in enumerate(tasks) if not task.done()])  # noqa: E731
            if idle_s >= limit_s:
                raise WaitError(
                    f"rollout.timeout_s = {limit_s:g} s went by in which the engine finished no prompt: {words()}."
                )
            if idle_s >= TELL_AFTER_S and not has_told:
                has_told = True
                tell(
                    f"the engine has finished no prompt for {idle_s:.0f} s: {words()}. rollout.timeout_s = {limit_s:g} ends "
                    "the wait."
                )
            next_look = limit_s if has_told else min(limit_s, TELL_AFTER_S)
            await asyncio.wait([everything], timeout=max(0.0, next_look - idle_s))
        return everything.result()
    finally:
        everything.cancel()
        for task in tasks:
            task.cancel()


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
