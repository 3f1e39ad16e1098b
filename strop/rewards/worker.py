"""What a worker process does: it loads a user's function, then scores what it is given until nobody gives it more.

Messages are pickles, each after its length in 8 bytes, on two pipes of their own: what the function prints does not get
between them. It sends ("ready", is_async) or ("refused", why), and for each call ("begun", number) and
("ended", number, outcomes): calls are numbered from 0 in the order in which they come. Those of an async function run side by
side, also with those that came before.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from strop.rewards.concurrent import Running, cancel
from strop.rewards.reading import ElsewhereError, Failure, Outcome
from strop.rewards.user_function import Call, UserFunction
from strop.types import RewardError

LENGTH_BYTES = 8
_sending = threading.Lock()


def main(tasks: int, results: int) -> None:
    """Serve until the pipe of tasks is closed. Never returns: threads of the function's own do not keep the process."""
    for number in (tasks, results):
        os.set_inheritable(number, False)  # programs that the function starts do not hold them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _serve(tasks, results)
    except KeyboardInterrupt:  # the run was interrupted and has no use for the answer
        os._exit(130)
    except BrokenPipeError:  # nor has one that is gone
        os._exit(1)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(0)


def _serve(tasks: int, results: int) -> None:
    spec = _read(tasks)
    try:
        function = UserFunction(spec)
    except RewardError as error:
        cause = "" if error.__cause__ is None else _text(error.__cause__)
        _send(results, ("refused", str(error), cause))
        return
    if spec.memory_limit_mb is not None:
        _limit_memory(spec.memory_limit_mb)
    _send(results, ("ready", function.is_async))
    if function.is_async:
        _score_side_by_side(function, tasks, results)
        return
    for first, calls in _tasks(tasks):
        with _refusing(results):
            function.score(calls, _Teller(results, first, tells_beginnings=len(calls) > 1))  # else the run knows


def _score_side_by_side(function: UserFunction, tasks: int, results: int) -> None:
    running: list[Running] = []

    def take(ended: Sequence[Any], calls: Sequence[Call], teller: _Teller) -> None:
        with _refusing(results):
            function.settle(ended, calls, teller)

    try:
        for first, calls in _tasks(tasks):
            teller = _Teller(results, first, tells_beginnings=True)
            running = [*(one for one in running if not one.is_done), function.begin(calls, teller)]
            running[-1].when_done(partial(take, calls=calls, teller=teller))
    except KeyboardInterrupt:
        cancel(running)
        raise


def _tasks(pipe: int) -> Iterator[tuple[int, Sequence[Call]]]:
    """Calls as they come, with the number of the first one."""
    first = 0
    while (calls := _read(pipe)) is not None:
        yield first, calls
        first += len(calls)


@contextlib.contextmanager
def _refusing(results: int) -> Iterator[None]:
    """A function that breaks its contract is told of."""
    try:
        yield
    except RewardError as error:
        _send(results, ("refused", str(error), ""))


class _Teller:
    """Tells the run of calls by their numbers."""

    def __init__(self, results: int, first: int, *, tells_beginnings: bool) -> None:
        self._results, self._first, self._tells_beginnings = results, first, tells_beginnings

    def begun(self, place: int) -> None:
        if self._tells_beginnings:
            _send(self._results, ("begun", self._first + place))

    def ended(self, place: int, outcomes: list[Outcome]) -> bool:
        if any(isinstance(outcome, Failure) and outcome.excluded == "scorer_out_of_memory" for outcome in outcomes):
            _lift_memory_limit()  # what is left may not do to say so; after that this process ends
        _send(self._results, ("ended", self._first + place, [_portable(outcome) for outcome in outcomes]))
        return True


def _portable(outcome: Outcome) -> Outcome:
    """An exception as its text: its class may be known here alone."""
    if isinstance(outcome, Failure) and outcome.error is not None:
        return replace(outcome, error=ElsewhereError(_text(outcome.error)))
    return outcome


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _read(pipe: int) -> Any:
    """The next message; None where nobody sends any more."""
    length = _read_bytes(pipe, LENGTH_BYTES)
    return pickle.loads(_read_bytes(pipe, int.from_bytes(length, "big"))) if length else None


def _read_bytes(pipe: int, number: int) -> bytes:
    parts = []
    while number:
        part = os.read(pipe, min(number, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        number -= len(part)
    return b"".join(parts)


def _send(pipe: int, message: Any) -> None:
    waiting = memoryview(packed(message))
    with _sending:  # what ends in the loop's thread is told of there
        while waiting:
            waiting = waiting[os.write(pipe, waiting) :]


def packed(message: Any) -> bytes:
    """A message as it goes through a pipe."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _limit_memory(megabytes: int) -> None:
    """So much on top of what the process has now that the function and what it imports are loaded. Linux alone holds it; where
    the whole machine runs out, the kernel is told to end this process rather than the run."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")


def _lift_memory_limit() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
