"""Calls of a user's function in worker processes: none can hang the run, end it, or take all its memory."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from strop.rewards.arrivals import Arrivals, coming
from strop.rewards.concurrent import MAX_WAIT_S
from strop.rewards.reading import ElsewhereError, Failure, Outcome
from strop.rewards.stream import Hear
from strop.rewards.user_function import Call, Found, FunctionSpec, split, timed_out
from strop.rewards.worker_process import WorkerProcess
from strop.types import RewardError, Rollout

logger = logging.getLogger("strop")

MAX_START_S = 600.0  # for a worker to load the function
GROW_AFTER_S = 0.05  # of calls that wait: a function that is fast has one worker
GRACE_S = 2.0  # for a worker to say itself that a call of an async function took too long
TELL_AFTER_S = 30.0  # of a call that has not ended
_POLL_S = 0.2  # between two looks at what no pipe tells


@dataclass(eq=False)
class _Worker:
    """A process and what it does: the places of calls that it was given, and since when which are made."""

    process: WorkerProcess
    started: float
    is_ready: bool = False
    is_spent: bool = False  # it is to end after what it does
    is_alone: bool = False  # the call that it makes must not have others beside it
    num_given: int = 0  # calls since it was started
    places: dict[int, int] = field(default_factory=dict)  # of calls in this round, by the worker's numbers for them
    left: set[int] = field(default_factory=set)
    begun: dict[int, float] = field(default_factory=dict)


class _Round:
    """The calls of one scoring: those that wait to be handed out, as tasks, and those whose outcomes are there."""

    def __init__(
        self, advance: Callable[[int], object], *, stops_at_failure: bool = False, hear: Hear | None = None
    ) -> None:
        self.calls: list[Call] = []
        self.waiting: deque[_Task] = deque()
        self.found = Found(self.calls, advance, stops_at_failure=stops_at_failure, hear=hear)
        self.left, self.is_stopped, self.is_whole = set[int](), False, False
        self.waiting_since, self.has_told = time.monotonic(), False

    def add(self, calls: Sequence[Call], *, together: bool) -> None:
        """More calls, to be handed out together or one by one."""
        if not self.waiting:
            self.waiting_since = time.monotonic()
        places = range(len(self.calls), len(self.calls) + len(calls))
        self.calls += calls
        self.left.update(places)
        if together and calls:
            self.waiting.append(_Task(tuple(places)))
        elif not together:
            self.waiting += [_Task((place,)) for place in places]

    @property
    def is_over(self) -> bool:
        return self.is_stopped or (self.is_whole and not self.left)

    def settle(self, place: int, outcomes: list[Outcome]) -> None:
        goes_on = self.found.ended(place, outcomes)
        self.left.discard(place)
        self.is_stopped = self.is_stopped or not goes_on


@dataclass(frozen=True)
class _Task:
    """Calls that are handed out together, by their places."""

    places: tuple[int, ...]
    is_alone: bool = False  # nothing else may be made beside it


class Pool:
    """Scores in worker processes.

    A call that takes too long ends with its worker, and so does one that ends its worker; both are failures of their
    rollouts alone, and another worker is started. An async function has one worker, which makes its calls side by side;
    where that worker is lost, the calls in flight are made again one by one, which shows whose fault it was.

    Args:
        spec: of the function, with its limits.
        num_workers: at most; None: as many as there are cores, 4 at most. An async or batched function has one.
        stops_at_failure: make no further calls when one has failed; they have no score.

    Raises:
        RewardError: the function cannot be loaded.
    """

    def __init__(self, spec: FunctionSpec, *, num_workers: int | None = None, stops_at_failure: bool = False) -> None:
        self._spec, self._stops, self._num_seen = spec, stops_at_failure, 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self.is_async, nothing = False, _Round(lambda done: None)
        try:
            self._start()
            while not self._workers[0].is_ready:
                self._listen(nothing)
                self._check_limits(nothing)
        except BaseException:
            self.close()
            raise
        has_one = self.is_async or spec.batched
        self._most = 1 if has_one else num_workers or min(4, num_cores())

    def __call__(
        self,
        rollouts: Sequence[Rollout] | Arrivals,
        advance: Callable[[int], object],
        hear: Hear | None = None,
    ) -> list[Outcome]:
        """An outcome for each rollout; for those that come while others are scored, too. With `hear` it is told of each
        outcome, and none is kept.

        Raises:
            RewardError: the function breaks its contract, or could not be loaded again.
            StoppedError: nobody wants the scores of those that come.
        """
        with coming(rollouts) as arrivals:
            return self._score(arrivals, advance, hear)

    def _score(self, arrivals: Arrivals, advance: Callable[[int], object], hear: Hear | None) -> list[Outcome]:
        first, num_came, numbered = self._num_seen, 0, list[tuple[int, Rollout]]()
        told = None if hear is None else lambda number, outcome: hear(number - first, outcome)
        round_ = _Round(advance, stops_at_failure=self._stops, hear=told)
        takes_all_at_once = self._spec.batched and self._spec.kind == "function"
        self._selector.register(arrivals.pipe, selectors.EVENT_READ)
        try:
            while not round_.is_over:
                new = list(enumerate(arrivals.take(), first + num_came))
                num_came += len(new)
                numbered += new if hear is None else []
                round_.is_whole = arrivals.has_ended
                if not takes_all_at_once:
                    round_.add(split(self._spec, new), together=self.is_async)
                elif round_.is_whole and not round_.calls:
                    round_.add(split(self._spec, numbered), together=True)
                self._hand_out(round_)
                if not round_.is_over:  # the last outcome may have come before the end of what arrives
                    self._listen(round_)
                self._check_limits(round_)
                self._tell_of_long_wait(round_)
        finally:  # at the end of an undisturbed round nobody is busy
            self._selector.unregister(arrivals.pipe)
            for worker in [w for w in self._workers if w.left]:
                self._drop(worker, grace_s=MAX_WAIT_S if self.is_async else 0.0)
        self._num_seen += num_came
        return [round_.found.outcomes.get(number) for number, _ in numbered]

    def close(self) -> None:
        """End all workers; the next scoring would start others."""
        for worker in list(self._workers):
            self._drop(worker)

    def _start(self) -> None:
        worker = _Worker(WorkerProcess(self._spec), time.monotonic())
        self._workers.append(worker)
        for pipe in worker.process.pipes:
            self._selector.register(
                pipe, selectors.EVENT_READ
            )  # which holds no worker: one ends when nobody holds the pool

    def _drop(self, worker: _Worker, *, grace_s: float = 0.0) -> None:
        self._workers.remove(worker)
        for pipe in worker.process.pipes:
            self._selector.unregister(pipe)
        worker.process.stop(grace_s=grace_s)

    # ---- handing out ----

    def _hand_out(self, round_: _Round) -> None:
        for worker in [w for w in self._workers if w.is_ready]:
            is_of_use = not (worker.is_spent or worker.process.has_ended)
            while is_of_use and self._may_have(worker, round_):
                is_of_use = self._give(worker, round_)
            if not is_of_use and not worker.left:
                self._drop(worker)
        if round_.waiting and self._may_start(round_):
            self._start()

    def _may_have(self, worker: _Worker, round_: _Round) -> bool:
        """Is there a task for this worker? Calls of an async function that came later go beside those that are made."""
        if not round_.waiting or not worker.left:
            return bool(round_.waiting)
        return self.is_async and not (worker.is_alone or round_.waiting[0].is_alone)

    def _give(self, worker: _Worker, round_: _Round) -> bool:
        task = round_.waiting[0]
        if not worker.process.send([round_.calls[place] for place in task.places]):
            return False
        round_.waiting.popleft()
        if not worker.left:
            worker.places, worker.begun = {}, {task.places[0]: time.monotonic()}
        worker.is_alone = task.is_alone
        worker.places |= enumerate(task.places, worker.num_given)
        worker.num_given += len(task.places)
        worker.left |= set(task.places)
        return True

    def _may_start(self, round_: _Round) -> bool:
        if not self._workers:
            return True
        if len(self._workers) >= self._most or not all(worker.is_ready for worker in self._workers):
            return False
        newest = max(worker.started for worker in self._workers)
        return time.monotonic() - max(newest, round_.waiting_since) > GROW_AFTER_S

    # ---- listening ----

    def _listen(self, round_: _Round) -> None:
        heard = {key.fd for key, _ in self._selector.select(self._until_next_limit())}
        for worker in list(self._workers):
            has_ended = worker.process.has_ended  # its pipe may stay open: what it started may hold it
            if has_ended or not heard.isdisjoint(worker.process.pipes):
                worker.process.pass_on_prints()
                for message in worker.process.messages():
                    self._take(worker, message, round_)
                if has_ended or worker.process.is_closed:
                    self._lose(worker, round_)

    def _take(self, worker: _Worker, message: tuple, round_: _Round) -> None:
        match message:
            case ("ready", is_async):
                worker.is_ready, self.is_async = True, is_async
            case ("refused", why, cause):
                self._drop(worker)
                raise RewardError(why) from (ElsewhereError(cause) if cause else None)
            case ("begun", number):
                worker.begun[worker.places[number]] = time.monotonic()
            case ("ended", number, outcomes):
                place = worker.places.pop(number)
                worker.left.discard(place)
                worker.begun.pop(place, None)
                worker.is_spent |= any(o.excluded == "scorer_out_of_memory" for o in outcomes if isinstance(o, Failure))
                round_.settle(place, outcomes)

    def _lose(self, worker: _Worker, round_: _Round) -> None:
        """A worker has ended."""
        how = worker.process.ending()
        if not worker.is_ready:
            raise RewardError(
                f"reward.function must be loaded without ending its process, but {self._spec.function} {how}."
            )
        self._drop(worker)
        if worker.left:
            self._settle_lost(worker, round_, Failure("scorer_crash", how, advice="look at what it printed"))

    def _settle_lost(self, worker: _Worker, round_: _Round, failure: Failure) -> None:
        """The call that was made has failed; of several each is made again alone, and those that had not begun as before."""
        suspects = [place for place in worker.places.values() if place in worker.begun]
        others = [place for place in worker.places.values() if place in worker.left and place not in worker.begun]
        if others:
            round_.waiting.appendleft(_Task(tuple(others)))
        if len(suspects) == 1:
            round_.settle(suspects[0], [failure] * len(round_.calls[suspects[0]]))
        else:
            round_.waiting.extendleft(_Task((place,), is_alone=True) for place in reversed(suspects))

    # ---- limits ----

    def _limit(self, worker: _Worker) -> float | None:
        """When a worker has taken too long."""
        if not worker.is_ready:
            return worker.started + MAX_START_S
        if self._spec.timeout_s is None or not worker.begun:
            return None
        return min(worker.begun.values()) + self._spec.timeout_s + (GRACE_S if self.is_async else 0.0)

    def _until_next_limit(self) -> float:
        limits = [limit for limit in map(self._limit, self._workers) if limit is not None]
        return max(0.0, min([_POLL_S, *(limit - time.monotonic() for limit in limits)]))

    def _check_limits(self, round_: _Round) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            limit = self._limit(worker)
            if limit is None or now < limit:
                continue
            if not worker.is_ready:
                raise RewardError(f"reward.function must be loaded within {MAX_START_S:g} s: {self._spec.function}.")
            self._drop(worker)
            assert self._spec.timeout_s is not None
            self._settle_lost(worker, round_, timed_out(self._spec.timeout_s))

    def _tell_of_long_wait(self, round_: _Round) -> None:
        now = time.monotonic()
        slow = sorted((begun, place) for worker in self._workers for place, begun in worker.begun.items())
        if round_.has_told or not slow or now - slow[0][0] < TELL_AFTER_S:
            return
        round_.has_told = True
        begun, place = slow[0]
        rollout = round_.calls[place][0][1]
        logger.warning(
            "scoring waits for %d calls of %s, one for %.0f s: prompt row %d, sample %d. reward.timeout_s = %g ends it.",
            *(len(slow), self._spec.function, now - begun, rollout.prompt.row, rollout.sample, self._spec.timeout_s),
        )


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
