"""Work with engines whose samples come from small servers, and faults between the two."""

import asyncio
import threading

from strop.runtime.audit.teacher_server import Dropped, Refused

DEADLINE_S = 20


def run_closed(engine, work):
    """What work with an engine returns, which is closed then."""

    async def whole():
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(whole())


def all_of(requests):
    async def work(engine):
        return await asyncio.gather(*map(engine.generate, requests))

    return work


def on(path, act, *, calls=(1,)):
    """A fault in the calls of these numbers to a path."""
    count, guard = 0, threading.Lock()

    def spoil(where, body, answer):
        nonlocal count
        if not where.endswith(path):
            return answer()
        with guard:
            count += 1
            is_meant = count in calls
        return act(answer) if is_meant else answer()

    return spoil


def drop(answer):
    raise Dropped


def refuse(answer):
    raise Refused(404, "Not Found")
