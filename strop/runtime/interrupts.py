"""Ctrl-C and SIGTERM as a flag that is looked at between two steps, so that no step is left half made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """True once somebody asked to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """The first signal sets the flag, a second one raises KeyboardInterrupt at once. Only in the main thread."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.signal(number, flag._handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
