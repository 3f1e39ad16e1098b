"""Work in a thread beside the event loop: who cancels its task is heard when it is done, and the second time ends it."""

import asyncio
import threading
import time

import pytest

from strop.runtime.beside import beside


def test_the_loop_goes_on_meanwhile_and_the_result_and_errors_come_back():
    async def work():
        may_end, ticks = threading.Event(), 0

        def wait():
            may_end.wait(60)
            return 7

        async def tick():
            nonlocal ticks
            while ticks < 5:
                ticks += 1
                await asyncio.sleep(0)
            may_end.set()

        found, _ = await asyncio.gather(beside(wait), tick())
        assert (found, ticks) == (7, 5)
        with pytest.raises(ZeroDivisionError):
            await beside(lambda: 1 / 0)

    asyncio.run(work())


def test_a_step_that_has_begun_is_made_and_the_cancellation_is_heard_after_it():
    async def work():
        begun, done = threading.Event(), []

        def step():
            begun.set()
            time.sleep(0.05)
            return "made"

        async def loop():
            done.append(await beside(step))
            await asyncio.sleep(0)
            done.append("went on")

        task = asyncio.create_task(loop())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["made"]

    asyncio.run(work())


def test_cancelling_twice_ends_the_work():
    async def work():
        begun, seen = threading.Event(), []

        def step():
            try:
                begun.set()
                for _ in range(2000):
                    time.sleep(0.005)
            except KeyboardInterrupt:
                seen.append("interrupted")
                raise

        task = asyncio.create_task(beside(step))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        await asyncio.wait([task], timeout=60)
        assert seen == ["interrupted"]
        assert isinstance(task.exception(), KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):  # asyncio ends its loop where a task is interrupted
        asyncio.run(work())
