"""Applies a scoring function to rollouts: only real numbers become rewards, and what fails follows one policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from strop.rewards.concurrent import as_error, run_all
from strop.rewards.reading import Failure, Per, Score, ScoreReader
from strop.types import Metric, RewardError, Rollout, StepMetrics

logger = logging.getLogger("strop")

OnError = Literal["fail", "zero", "exclude"]


@dataclass(frozen=True, slots=True)
class Scored:
    """Rollouts in the order they came, each with a reward or a reason why it has none."""

    rollouts: tuple[Rollout, ...]
    metrics: StepMetrics


class Scorer:
    """Scores what the policy wrote.

    A reward of None leaves the statistics and the loss; `excluded` says why: "no_score" (the function returned None),
    "scorer_error" or "nan_score" (on_error = "exclude"). A rollout that is excluded already is passed through. Metrics:
    `reward/num_errors` (raised, or not finite) and `reward/num_excluded`.

    Args:
        score: takes a `Rollout` and returns what `ScoreReader` reads; with is_batched, takes a list and returns as many, an
            exception in place of a score that failed.
        name: of the function, for messages.
        on_error: when `score` raises or a score is not finite: raise RewardError, score 0.0 (in each name, where others of the
            batch have named rewards), or leave the rollout out.
        is_batched: `score` takes a list.
        max_concurrent: `score` is a coroutine function, of which so many calls run at once; None: it is a plain one.
        per: what the numbers of a returned list belong to.
        weights: of named rewards.
        metrics: called after each batch for counts of the function's own.

    >>> from strop.types import Prompt
    >>> prompt = Prompt(row=0, tokens=(5,), text="2+3=", label="5")
    >>> rollout = Rollout(prompt, 0, 0, (5, 9), (False, True), (0.0, -0.5), (-1, 0), "stop", text="5")
    >>> scored = Scorer(lambda rollout: len(rollout.text), "length", "fail")([rollout])
    >>> scored.rollouts[0].reward
    1.0
    """

    def __init__(
        self,
        score: Callable[[Any], Any],
        name: str,
        on_error: OnError = "fail",
        *,
        is_batched: bool = False,
        max_concurrent: int | None = None,
        per: Per = "response",
        weights: Mapping[str, float] | None = None,
        metrics: Callable[[], StepMetrics] | None = None,
    ) -> None:
        self.name = name
        self._score, self._on_error, self._is_batched, self._metrics = score, on_error, is_batched, metrics
        self._max_concurrent, self._reader = max_concurrent, ScoreReader(name, per, weights)
        self._has_logged = False

    def __call__(self, rollouts: Sequence[Rollout], advance: Callable[[int], object] = lambda done: None) -> Scored:
        """Score rollouts. `advance` is told how many are done, where they are scored one by one.

        Raises:
            RewardError: on_error = "fail" and the function raised or gave a score that is not finite; or, whatever
                on_error says, the function breaks its contract: not a number, or not as many values as rollouts.
        """
        asked = [rollout for rollout in rollouts if rollout.excluded is None]
        if self._is_batched:
            results = self._score_batch(asked)
        elif self._max_concurrent is not None:
            results = self._score_concurrently(asked, self._max_concurrent, advance)
        else:
            results = self._score_each(asked, advance)
        scored: list[Rollout] = []
        failed: list[int] = []
        for place, rollout in enumerate(rollouts):
            outcome = None if rollout.excluded else next(results)
            if isinstance(outcome, Failure):
                failed.append(place)
            scored.append(rollout if rollout.excluded else self._settle(rollout, outcome))
        if self._on_error == "zero":
            _name_zeros(scored, failed)
        num_excluded = sum(rollout.excluded is not None for rollout in scored)
        metrics: StepMetrics = {
            "reward/num_errors": Metric("sum", len(failed)),
            "reward/num_excluded": Metric("sum", num_excluded),
        }
        return Scored(tuple(scored), metrics | (self._metrics() if self._metrics else {}))

    def _score_each(
        self, rollouts: list[Rollout], advance: Callable[[int], object]
    ) -> Iterator[Score | Failure | None]:
        for done, rollout in enumerate(rollouts):
            outcome = self._score_one(rollout)
            advance(done + 1)
            yield outcome

    def _score_one(self, rollout: Rollout) -> Score | Failure | None:
        try:
            value = self._score(rollout)
        except RewardError:  # of strop's own scorers: the data lacks what they need
            raise
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; on_error decides
            return self._failure(error, rollout)
        except SystemExit as ended:
            return self._failure(as_error(ended), rollout)
        return self._reader.read(value, rollout)

    def _score_concurrently(
        self, rollouts: list[Rollout], max_concurrent: int, advance: Callable[[int], object]
    ) -> Iterator[Score | Failure | None]:
        calls = [partial(self._score, rollout) for rollout in rollouts]
        values = run_all(calls, max_concurrent=max_concurrent, advance=advance) if calls else []
        yield from self._read_all(values, rollouts)

    def _score_batch(self, rollouts: list[Rollout]) -> Iterator[Score | Failure | None]:
        """Lazy: where nobody asks for a first score, because there is no rollout, the function is not called."""
        try:
            values = self._score(list(rollouts))
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  as above
            yield from [self._failure(error, rollouts[0])] * len(rollouts)
            return
        except SystemExit as ended:
            yield from [self._failure(as_error(ended), rollouts[0])] * len(rollouts)
            return
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
            raise RewardError(
                f"{self.name} must return a list of one score for each rollout (reward.batched = true), "
                f"got {type(values).__name__} for {len(rollouts)} rollouts."
            )
        if len(values) != len(rollouts):
            raise RewardError(
                f"{self.name} must return one score for each rollout (reward.batched = true), "
                f"got {len(values)} scores for {len(rollouts)} rollouts."
            )
        yield from self._read_all(values, rollouts)

    def _read_all(self, values: Iterable[Any], rollouts: list[Rollout]) -> Iterator[Score | Failure | None]:
        for value, rollout in zip(values, rollouts, strict=True):
            if isinstance(value, RewardError):
                raise value
            is_error = isinstance(value, BaseException)  # of one rollout, where the others have their scores
            yield self._failure(value, rollout) if is_error else self._reader.read(value, rollout)

    def _failure(self, error: BaseException, rollout: Rollout) -> Failure:
        if not self._has_logged:
            self._has_logged = True
            logger.warning(
                "%s raised for prompt row %d (reward.on_error = %s). Further errors are not shown.",
                *(self.name, rollout.prompt.row, self._on_error),
                exc_info=error,
            )
        return Failure("scorer_error", f"raised {type(error).__name__}: {error}", error)

    def _settle(self, rollout: Rollout, outcome: Score | Failure | None) -> Rollout:
        if outcome is None:
            return replace(rollout, reward=None, excluded="no_score")
        if isinstance(outcome, Score):
            parts, by_token = outcome.parts, outcome.token_rewards
            return replace(rollout, reward=outcome.reward, reward_parts=parts, token_rewards=by_token)
        if self._on_error == "fail":
            raise RewardError(
                f"{self.name} must return a finite number, or None for no score, but it {outcome.reason} for prompt "
                f"row {rollout.prompt.row}, sample {rollout.sample}. Mend it, or set reward.on_error = zero or exclude."
            ) from outcome.error
        if self._on_error == "zero":
            return replace(rollout, reward=0.0)
        return replace(rollout, reward=None, excluded=outcome.excluded)


class Unscored(Scorer):
    """Leaves rollouts as they are: a teacher alone says what is learned, and there is nothing to count."""

    def __init__(self) -> None:
        super().__init__(lambda rollout: None, "none")

    def __call__(self, rollouts: Sequence[Rollout], advance: Callable[[int], object] = lambda done: None) -> Scored:
        return Scored(tuple(rollouts), {})


def _name_zeros(scored: list[Rollout], failed: list[int]) -> None:
    """Where others of the batch have named rewards, a failed rollout that scores 0 scores 0 in each name."""
    names = next((rollout.reward_parts for rollout in scored if rollout.reward_parts), None)
    for place in failed if names else ():
        scored[place] = replace(scored[place], reward_parts=dict.fromkeys(names or (), 0.0))
