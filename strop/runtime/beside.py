"""Work in a thread beside the event loop, which goes on with what is asked of it meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def beside(work: Callable[[], T]) -> T:
    """What work in a thread of its own returns, or raises.

    Whoever cancels the task that waits for it hears of it when the work is done: a step that has begun is made. Who cancels it
    twice ends the work with a KeyboardInterrupt in its thread, as a second Ctrl-C does in the main thread.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            loop.call_soon_threadsafe(outcome.set_exception, error)
        else:
            loop.call_soon_threadsafe(outcome.set_result, found)

    thread = threading.Thread(target=run, name="strop-training", daemon=True)
    thread.start()
    num_cancelled = 0
    while not outcome.done():
        try:
            await asyncio.wait([outcome])
        except asyncio.CancelledError:
            num_cancelled += 1
            if num_cancelled == 2 and thread.ident is not None:
                _raise_in(thread.ident)
    task = asyncio.current_task()
    if num_cancelled and task is not None:
        task.cancel()  # heard where the task waits next
    return outcome.result()


def _raise_in(thread: int) -> None:
    """A KeyboardInterrupt where the thread is next at a line of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
