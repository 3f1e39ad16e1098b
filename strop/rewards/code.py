"""The response is a program, which must pass the tests of the label."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

from strop.rewards.arrivals import Arrivals, coming
from strop.rewards.code_tests import CodeTest, code_label
from strop.rewards.jail import Ended, Isolation, Jail, Limits, describe
from strop.rewards.label import read_label
from strop.rewards.pool import num_cores
from strop.rewards.reading import Outcome, Score
from strop.rewards.stream import Hear
from strop.types import Metric, Rollout, StepMetrics

logger = logging.getLogger("strop")

MAX_JAILS = 16
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_COUNTED: dict[Ended, str] = {
    "timeout": "reward/num_timeouts",
    "memory": "reward/num_out_of_memory",
    "processes": "reward/num_too_many_processes",
    "crash": "reward/num_crashes",
    "wrong": "reward/num_wrong",
}


class CodeScore:
    """1 where the program of a response passes all tests of its label, else 0; or the share of them that it passes.

    Each test is a run of its own. The output must be the wanted one but for white space at the ends of lines and of the
    text; an assert must not fail. `take_metrics` counts responses by what became of the first test that they failed:
    `reward/num_timeouts`, `num_out_of_memory`, `num_too_many_processes`, `num_crashes` (any other exception or exit code,
    or an end before the test's) and `num_wrong`. After one that takes too long no others are run.

    Args:
        limits: of each run.
        score: "all" or "fraction".
        isolation: of the processes that run programs.

    Raises:
        RewardError: a label holds no tests; or this machine can run no programs.
    """

    def __init__(self, limits: Limits, score: Literal["all", "fraction"], isolation: Isolation) -> None:
        self._limits, self._score, self._isolation = limits, score, isolation
        self._jails, self._own, self._counts = [Jail(isolation)], threading.local(), Counter[Ended]()
        self._jails[0].check(limits)
        self._spare, self._lock = list(self._jails), threading.Lock()
        if "files" not in self._jails[0].kept:
            logger.warning("reward.kind = code runs what the model writes with %s.", describe(self._jails[0].kept))

    def __call__(
        self,
        rollouts: Sequence[Rollout] | Arrivals,
        advance: Callable[[int], object],
        hear: Hear | None = None,
    ) -> list[Outcome]:
        """A score for each rollout. With `hear` it is told of each, and none is kept."""
        self._spare, self._own, self._is_stopped = list(self._jails), threading.local(), False
        with coming(rollouts) as arrivals, ThreadPoolExecutor(min(num_cores(), MAX_JAILS)) as pool:
            try:
                found = [one for one in self._found(arrivals, pool, advance, hear) if hear is None]
            except BaseException:
                self._is_stopped = True  # programs that run come to their end; no others begin
                pool.shutdown(cancel_futures=True)
                raise
        self._count(ended for _, ended in found)
        return [Score(passed) for passed, _ in found]

    def _found(
        self,
        arrivals: Arrivals,
        pool: ThreadPoolExecutor,
        advance: Callable[[int], object],
        hear: Hear | None,
    ) -> Iterator[tuple[float, Ended]]:
        """What each rollout earns and how its first failed test ended, in the order in which they come."""
        running, done = deque[Future[tuple[float, Ended]]](), 0
        while running or not arrivals.has_ended:
            for rollout in arrivals.take():
                running.append(pool.submit(self._of_one, rollout, read_label(rollout.prompt, code_label)))
                if hear is not None:
                    running[-1].add_done_callback(partial(self._tell, hear, done + len(running) - 1))
                running[-1].add_done_callback(lambda ended: arrivals.wake())
            while running and running[0].done():
                done += 1
                advance(done)
                yield running.popleft().result()
            if running or not arrivals.has_ended:
                arrivals.wait()

    def _tell(self, hear: Hear, place: int, ended: Future[tuple[float, Ended]]) -> None:
        """Of one that is scored before its turn; an error is raised when that comes."""
        if not ended.cancelled() and ended.exception() is None:
            passed, why = ended.result()
            self._count([why])
            hear(place, Score(passed))

    def _count(self, endings: Iterable[Ended]) -> None:
        with self._lock:
            self._counts.update(endings)

    def take_metrics(self) -> StepMetrics:
        """Counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: Metric("sum", counts[ended]) for ended, name in _COUNTED.items()}

    def close(self) -> None:
        """End the processes that run programs."""
        for jail in self._jails:
            jail.close()

    def _of_one(self, rollout: Rollout, tests: Sequence[CodeTest]) -> tuple[float, Ended]:
        """What it earns, and how the first test ended that it failed."""
        program = program_of(rollout.text)
        first: Ended = ""
        num_passed = 0
        for test in tests:
            ended = self._of_test(program, test)
            first = first or ended
            num_passed += not ended
            if ended and self._score == "all":
                return 0.0, first
            if ended == "timeout" or self._is_stopped:
                break  # others would take as long
        return num_passed / len(tests), first

    def _of_test(self, program: str, test: CodeTest) -> Ended:
        if not program:
            return "wrong"
        wanted = test.stdout.encode("utf-8", "replace")
        most = 2 * len(wanted) + 4096  # white space at the ends of lines included
        ran = self._jail().run(program, self._limits, stdin=test.stdin, test=test.code, max_output=most)
        if ran.ended or test.code is not None:
            return ran.ended
        return "" if _lines(ran.out) == _lines(wanted.decode()) else "wrong"

    def _jail(self) -> Jail:
        """That of this thread."""
        if not hasattr(self._own, "jail"):
            with self._lock:
                if not self._spare:
                    self._jails.append(Jail(self._isolation))
                    self._spare.append(self._jails[-1])
                self._own.jail = self._spare.pop()
        return self._own.jail


def program_of(text: str) -> str:
    """The last block of Python code between fences; without one, the last block of any kind; without fences the whole text.

    >>> program_of("First:\\n```python\\nprint(1)\\n```\\nthat is all")
    'print(1)'
    """
    blocks = [(found["language"].lower(), found["body"]) for found in _FENCE.finditer(text)]
    of_python = [body for language, body in blocks if language in ("python", "py", "python3")]
    return (of_python or [body for _, body in blocks] or [text])[-1].strip("\n").rstrip()


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
