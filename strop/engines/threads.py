"""The same call for many items at once, for calls that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def map_in_threads(
    function: Callable[[A], B], items: Sequence[A], *, num_threads: int, advance: Callable[[int], None]
) -> list[B]:
    """`function` of each item, in the order of the items; the first error is raised as soon as it is there.

    The threads are daemons, so that a run that is stopped does not wait for answers that nobody will read.

    >>> map_in_threads(lambda x: 2 * x, [3, 1, 2], num_threads=2, advance=lambda done: None)
    [6, 2, 4]
    """
    waiting: SimpleQueue[tuple[int, A]] = SimpleQueue()
    done: SimpleQueue[tuple[int, B | None, BaseException | None]] = SimpleQueue()
    for numbered in enumerate(items):
        waiting.put(numbered)

    def work() -> None:
        while True:
            try:
                place, item = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put((place, function(item), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                done.put((place, None, error))

    for _ in range(min(num_threads, len(items))):
        threading.Thread(target=work, daemon=True).start()
    found: dict[int, B] = {}
    try:
        for count in range(1, len(items) + 1):
            place, value, error = done.get()
            if error is not None:
                raise error
            found[place] = value  # type: ignore[assignment]
            advance(count)
    finally:
        _empty(waiting)
    return [found[place] for place in range(len(items))]


def _empty(queue: SimpleQueue[tuple[int, A]]) -> None:
    while True:
        try:
            queue.get_nowait()
        except Empty:
            return
