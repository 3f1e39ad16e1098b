"""Simulated engines: continuous batching, in which every running sequence gains one token in each decode step."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import simpy

from strop.config.simulation import SimulationConfig


@dataclass(slots=True)
class Sample:
    """A response that is to be sampled; `version` is that of its oldest token, the policy at its beginning."""

    num_tokens: int
    unit: Any = None  # what it is scored with
    version: int = 0


class SimulatedEngine:
    """Decodes up to `max_sequences` samples at a time; n of them gain a token each in
    `decode_step_s + n * decode_sequence_s` seconds. The others wait in the order of their arrival.

    Args:
        env: the simulation.
        config: the plan.
        ended: told of each sample when its last token is there.
    """

    def __init__(self, env: simpy.Environment, config: SimulationConfig, ended: Callable[[Sample], None]) -> None:
        self.in_flight, self.version = 0, 0
        self.busy_s, self.sequence_s = 0.0, 0.0  # with at least one sequence; summed over sequences
        self._env, self._config, self._ended = env, config, ended
        self._waiting, self._running = deque[Sample](), list[tuple[float, int, Sample]]()
        self._tokens, self._serial = 0.0, count()  # tokens that a sequence that was always running would have
        self._num_stops, self._is_woken = 0, False
        self._process = env.process(self._run())

    def submit(self, samples: Sequence[Sample]) -> None:
        """Put samples behind those that wait."""
        self.in_flight += len(samples)
        self._waiting.extend(samples)
        if len(self._running) < self._config.max_sequences:
            self._wake()

    def stop(self, *, loses: bool = False) -> None:
        """Decode nothing until `go`. With `loses` what is running begins anew, before all that waits."""
        self._num_stops += 1
        if loses:
            self._waiting.extendleft(sample for *_, sample in sorted(self._running, reverse=True))
            self._running.clear()
        self._wake()

    def go(self) -> None:
        """The end of one `stop`."""
        self._num_stops -= 1
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._process.interrupt()

    def _run(self) -> Any:
        while True:
            began, num_running = self._env.now, 0 if self._num_stops else len(self._running)
            step_s = self._config.decode_step_s + num_running * self._config.decode_sequence_s
            try:
                if num_running:
                    yield self._env.timeout(max(self._running[0][0] - self._tokens, 0.0) * step_s)
                    self._tokens = self._running[0][0]
                else:
                    yield self._env.event()  # until it is woken
            except simpy.Interrupt:
                self._is_woken = False
                self._tokens += (self._env.now - began) / step_s if num_running else 0.0
            self.busy_s += (self._env.now - began) * bool(num_running)
            self.sequence_s += (self._env.now - began) * num_running
            if not self._num_stops:
                self._turn_over()

    def _turn_over(self) -> None:
        """Samples that are complete leave; those that wait take the free places."""
        while self._running and self._running[0][0] <= self._tokens:
            sample = heapq.heappop(self._running)[-1]
            self.in_flight -= 1
            self._ended(sample)
        while self._waiting and len(self._running) < self._config.max_sequences:
            sample = self._waiting.popleft()
            sample.version = self.version
            heapq.heappush(self._running, (self._tokens + sample.num_tokens, next(self._serial), sample))


class Fleet:
    """All engines of a run."""

    def __init__(self, env: simpy.Environment, config: SimulationConfig, ended: Callable[[Sample], None]) -> None:
        self.engines = [SimulatedEngine(env, config, ended) for _ in range(config.num_engines)]

    def submit(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Give each group to the engine with the fewest samples in flight."""
        loads = [(engine.in_flight, place) for place, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        for group in groups:
            load, place = loads[0]
            self.engines[place].submit(group)
            heapq.heapreplace(loads, (load + len(group), place))

    def stop(self) -> None:
        """All engines wait for new weights."""
        for engine in self.engines:
            engine.stop()

    def go(self, version: int) -> None:
        """All engines have the weights of a policy version. What is in flight goes on with them."""
        for engine in self.engines:
            engine.version = version
            engine.go()


def decode_seconds(config: SimulationConfig, groups: Sequence[Sequence[int]]) -> float:
    """Seconds that the engines take for groups of responses of these lengths, all there at the beginning."""
    env = simpy.Environment()
    Fleet(env, config, lambda _: None).submit([[Sample(tokens) for tokens in group] for group in groups])
    env.run()
    return float(env.now)
