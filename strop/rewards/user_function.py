"""A user's scoring function: found where it is, called with what it takes, and what it returns read.

In a worker process or in that of the run; light to import, since every worker does it.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from strop.rewards.concurrent import Running, as_error, is_async
from strop.rewards.function import load_function
from strop.rewards.reading import Failure, Outcome, Per, ScoreReader
from strop.types import RewardError, Rollout

Call = Sequence[tuple[int, Rollout]]  # what the function is given at once: rollouts, each with its number in the run


@dataclass(frozen=True)
class FunctionSpec:
    """The options of a reward of kind function or slime as plain data. Limits are None where nothing can hold them: in the
    process of the run."""

    kind: Literal["function", "slime"]
    function: str
    batched: bool = False
    per: Per = "response"
    weights: Mapping[str, float] = field(default_factory=dict)
    max_concurrent: int = 64
    reward_key: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    memory_limit_mb: int | None = None
    is_seeded: bool = False  # each call of a function that is not async begins with random numbers of its rollout's own


class Told(Protocol):
    """Hears of calls by their place."""

    def begun(self, place: int) -> None: ...

    def ended(self, place: int, outcomes: list[Outcome]) -> bool:
        """One outcome for each rollout of the call. False: nobody wants the calls that have not begun."""
        ...


def split(spec: FunctionSpec, numbered: Call) -> list[Call]:
    """The calls in which rollouts are scored: one for each; all at once; or for slime's batched ones one for each prompt."""
    if not spec.batched:
        return [[one] for one in numbered]
    if spec.kind == "function":
        return [numbered] if numbered else []
    groups: dict[int, list[tuple[int, Rollout]]] = {}
    for number, rollout in numbered:
        groups.setdefault(rollout.group_id, []).append((number, rollout))
    return list(groups.values())


class UserFunction:
    """The function that a spec names, loaded.

    Raises:
        RewardError: it cannot be loaded.
    """

    def __init__(self, spec: FunctionSpec) -> None:
        self._spec, self._slime = spec, None
        if spec.kind == "slime":
            from strop.compat.slime import SlimeReward, provide_slime_types

            provide_slime_types()
            self._slime = SlimeReward(
                spec.function, spec.args, reward_key=spec.reward_key, is_batched=spec.batched
            )  # fmt: skip
        self._function: Callable[..., Any] = load_function(spec.function)
        self.is_async = spec.kind == "slime" or is_async(self._function)
        self._reader = ScoreReader(spec.function, spec.per, spec.weights)
        self._places = asyncio.Semaphore(spec.max_concurrent)

    def score(self, calls: Sequence[Call], told: Told) -> None:
        """Make the calls, one after the other, or where the function is async side by side.

        Raises:
            RewardError: the function breaks its contract: not a number, or not as many values as rollouts.
        """
        if self.is_async:
            self.settle(self.begin(calls, told).result(), calls, told)
            return
        for place, call in enumerate(calls):
            told.begun(place)
            if not told.ended(place, self._ask(call)):
                return

    def _ask(self, call: Call) -> list[Outcome]:
        if self._spec.is_seeded:
            _seed(call[0][1])
        try:
            returned = self._function(*self._arguments(call))
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; on_error decides
            return self._failed(error, call)
        except SystemExit as ended:
            return self._failed(as_error(ended), call)
        return self._read(returned, call)

    def begin(self, calls: Sequence[Call], told: Told) -> Running:
        """Make the calls of an async function; `settle` takes what they give in the end."""

        async def one(place: int, call: Call) -> None:
            told.begun(place)
            told.ended(place, await self._ask_async(call))

        return Running([partial(one, place, call) for place, call in enumerate(calls)], self._places)

    def settle(self, ended: Sequence[Any], calls: Sequence[Call], told: Told) -> None:
        """Look at how the calls of an async function ended: most have told of that themselves.

        Raises:
            RewardError: as for `score`.
        """
        for place, error in enumerate(ended):
            if isinstance(error, RewardError):
                raise error
            if isinstance(error, BaseException):  # it would have ended the loop
                told.ended(place, self._failed(error, calls[place]))

    async def _ask_async(self, call: Call) -> list[Outcome]:
        limit = asyncio.timeout(self._spec.timeout_s)
        try:
            async with limit:
                returned = self._function(*self._arguments(call))
                returned = await returned if inspect.isawaitable(returned) else returned
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  as above
            if limit.expired() and self._spec.timeout_s is not None:
                return [timed_out(self._spec.timeout_s)] * len(call)
            return self._failed(error, call)
        return self._read(returned, call)

    def _arguments(self, call: Call) -> tuple[Any, ...]:
        if self._slime is not None:
            return self._slime.arguments(call)
        rollouts = [rollout for _, rollout in call]
        return (rollouts,) if self._spec.batched else (rollouts[0],)

    def _read(self, returned: Any, call: Call) -> list[Outcome]:
        if self._slime is not None:
            values: Sequence[Any] = self._slime.values(returned, len(call))
        else:
            values = self._as_many(returned, len(call)) if self._spec.batched else [returned]
        return [self._read_one(value, rollout) for value, (_, rollout) in zip(values, call, strict=True)]

    def _read_one(self, value: Any, rollout: Rollout) -> Outcome:
        if isinstance(value, RewardError):
            raise value
        if isinstance(value, BaseException):  # of one rollout, where the others have their scores
            return self._failure(value)
        return self._reader.read(value, rollout)

    def _as_many(self, values: Any, number: int) -> Sequence[Any]:
        name = self._spec.function
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
            raise RewardError(
                f"{name} must return a list of one score for each rollout (reward.batched = true), "
                f"got {type(values).__name__} for {number} rollouts."
            )
        if len(values) != number:
            raise RewardError(
                f"{name} must return one score for each rollout (reward.batched = true), "
                f"got {len(values)} scores for {number} rollouts."
            )
        return values

    def _failed(self, error: BaseException, call: Call) -> list[Outcome]:
        return [self._failure(error)] * len(call)

    def _failure(self, error: BaseException) -> Failure:
        limit = self._spec.memory_limit_mb
        is_short = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        if limit is not None and is_short:
            return out_of_memory(limit, error)
        return Failure("scorer_error", f"raised {type(error).__name__}: {error}", error)


class OwnProcess:
    """Scores in the process of the run, where nothing can stop a call but Ctrl-C.

    Args:
        spec: of the function.
        stops_at_failure: do not begin further calls when one has failed; they have no score.
    """

    def __init__(self, spec: FunctionSpec, *, stops_at_failure: bool = False) -> None:
        self._spec, self._stops, self._num_seen = spec, stops_at_failure, 0
        self._function = UserFunction(spec)
        self.is_async = self._function.is_async

    def __call__(self, rollouts: Sequence[Rollout], advance: Callable[[int], object]) -> list[Outcome]:
        """An outcome for each rollout."""
        numbered = list(enumerate(rollouts, self._num_seen))
        self._num_seen += len(rollouts)
        calls = split(self._spec, numbered)
        found = Found(calls, advance, stops_at_failure=self._stops)
        self._function.score(calls, found)
        return [found.outcomes.get(number) for number, _ in numbered]

    def close(self) -> None:
        """Nothing is open."""


class Found:
    """Collects what becomes of calls. `outcomes` are by the numbers of the rollouts; where `hear` is told of them, none is
    kept, and neither is what was called."""

    def __init__(
        self,
        calls: list[Call],
        advance: Callable[[int], object],
        *,
        stops_at_failure: bool = False,
        hear: Callable[[int, Outcome], object] | None = None,
    ) -> None:
        self._calls, self._advance, self._stops, self._hear = calls, advance, stops_at_failure, hear
        self.outcomes: dict[int, Outcome] = {}

    def begun(self, place: int) -> None:
        """Nothing to remember."""

    def ended(self, place: int, outcomes: list[Outcome]) -> bool:
        """Keep what a call gave. False where a failure ends everything."""
        for (number, _), outcome in zip(self._calls[place], outcomes, strict=True):
            if self._hear is not None:
                self._hear(number, outcome)
                continue
            self.outcomes[number] = outcome
            self._advance(len(self.outcomes))
        if self._hear is not None:
            self._calls[place] = ()
        return not (self._stops and any(isinstance(outcome, Failure) for outcome in outcomes))


def timed_out(limit_s: float) -> Failure:
    """Of a call that took longer than it may."""
    reason = f"did not end within reward.timeout_s = {limit_s:g} s and was stopped"
    return Failure("scorer_timeout", reason, advice="raise reward.timeout_s")


def out_of_memory(limit_mb: int, error: BaseException) -> Failure:
    """Of a call that wanted more memory than it may have."""
    reason = f"needed more than reward.memory_limit_mb = {limit_mb}"
    return Failure("scorer_out_of_memory", reason, error, advice="raise reward.memory_limit_mb")


def _seed(rollout: Rollout) -> None:
    """Random numbers that follow from what is scored: the same whichever worker scores it, and whatever it scored before."""
    place = (rollout.prompt.row, rollout.group_id, rollout.sample, rollout.tokens)
    seed = zlib.crc32(repr(place).encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
