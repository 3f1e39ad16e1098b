"""What Ctrl-C and SIGTERM do. The first one asks to stop: a run ends after its step, with everything saved. A second one
stops at once. Handlers go up in the main thread alone, and never where the shell made the process ignore the signal."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """True once somebody asked to stop."""

    def __init__(self) -> None:
        self.is_set = False


_starting = StopFlag()  # of the command that is starting, if one is
_is_interruptible = False


@contextmanager
def starting_up() -> Iterator[StopFlag]:
    """Around a whole command: a signal raises KeyboardInterrupt, and the flag remembers it, because an import that is
    interrupted may swallow the exception or turn it into another one. What comes later looks with `check`."""
    global _starting
    flag = _starting = StopFlag()

    def handle() -> None:
        flag.is_set = True
        raise KeyboardInterrupt

    before = sys.unraisablehook

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt):  # of one that fell into a destructor the flag knows
            before(found)

    with _handling(handle):
        sys.unraisablehook = unraisable
        try:
            yield flag
        finally:
            sys.unraisablehook = before
            _starting = StopFlag()


def ignore() -> None:
    """From now on signals are ignored: the command has said that it stopped, and the interpreter is going down."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raise the KeyboardInterrupt that something swallowed while the command was starting."""
    if _starting.is_set:
        raise KeyboardInterrupt


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """For a loop that looks at the flag between two steps."""
    check()
    flag = StopFlag()

    def handle() -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    with _handling(handle):
        yield flag


@contextmanager
def cancelling() -> Iterator[StopFlag]:
    """For the running task: the first signal cancels it where it next waits, and at once within `interruptible`."""
    check()
    flag, loop, task = StopFlag(), asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def handle() -> None:
        was_set, flag.is_set = flag.is_set, True
        if was_set or _is_interruptible:
            raise KeyboardInterrupt
        loop.call_soon_threadsafe(task.cancel)

    with _handling(handle):
        yield flag


@contextmanager
def interruptible() -> Iterator[None]:
    """Around work of a task that takes long, never waits, and changes nothing that is kept, such as scoring."""
    global _is_interruptible
    _is_interruptible = True
    try:
        yield
    except KeyboardInterrupt:
        raise asyncio.CancelledError from None
    finally:
        _is_interruptible = False


@contextmanager
def _handling(handle: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        handle()

    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:  # `ignore` stays
                signal.signal(number, earlier)
