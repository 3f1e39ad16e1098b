"""Applies a scoring function to rollouts: only real numbers become rewards, and what fails follows one policy."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal

from strop.types import Metric, RewardError, Rollout, StepMetrics

logger = logging.getLogger("strop")

OnError = Literal["fail", "zero", "exclude"]


@dataclass(frozen=True, slots=True)
class Scored:
    """Rollouts in the order they came, each with a reward or a reason why it has none."""

    rollouts: tuple[Rollout, ...]
    metrics: StepMetrics


@dataclass(frozen=True, slots=True)
class _Failure:
    """No score, because of `error`, or because the score is not finite."""

    excluded: str
    reason: str
    error: Exception | None = None


class Scorer:
    """Scores what the policy wrote.

    A reward of None leaves the statistics and the loss; `excluded` says why: "no_score" (the function returned None),
    "scorer_error" or "nan_score" (on_error = "exclude"). A rollout that is excluded already is passed through. Metrics:
    `reward/num_errors` (raised, or not finite) and `reward/num_excluded`.

    Args:
        score: takes a `Rollout` and returns a number or None; with is_batched, takes a list and returns as many, an exception
            in place of a score that failed.
        name: of the function, for messages.
        on_error: when `score` raises or a score is not finite: raise RewardError, score 0.0 (in each name, where others of the
            batch have named rewards), or leave the rollout out.
        is_batched: `score` takes a list.
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
        metrics: Callable[[], StepMetrics] | None = None,
    ) -> None:
        self.name = name
        self._score, self._on_error, self._is_batched, self._metrics = score, on_error, is_batched, metrics
        self._has_logged = False

    def __call__(self, rollouts: Sequence[Rollout]) -> Scored:
        """Score rollouts.

        Raises:
            RewardError: on_error = "fail" and the function raised or gave a score that is not finite; or, whatever
                on_error says, the function breaks its contract: not a number, or not as many values as rollouts.
        """
        asked = [rollout for rollout in rollouts if rollout.excluded is None]
        outcomes = self._score_batch(asked) if self._is_batched else (self._score_one(rollout) for rollout in asked)
        results = iter(outcomes)
        scored: list[Rollout] = []
        failed: list[int] = []
        for place, rollout in enumerate(rollouts):
            outcome = None if rollout.excluded else next(results)
            if isinstance(outcome, _Failure):
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

    def _score_one(self, rollout: Rollout) -> float | _Failure | dict[str, float] | None:
        try:
            value = self._score(rollout)
        except RewardError:  # of strop's own scorers: the data lacks what they need
            raise
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; on_error decides
            return self._failure(error, rollout)
        return self._checked(value, rollout)

    def _score_batch(self, rollouts: list[Rollout]) -> Iterator[float | _Failure | dict[str, float] | None]:
        """Lazy: where nobody asks for a first score, because there is no rollout, the function is not called."""
        try:
            values = self._score(list(rollouts))
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  as above
            yield from [self._failure(error, rollouts[0])] * len(rollouts)
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
        for value, rollout in zip(values, rollouts, strict=True):
            is_error = isinstance(value, Exception)  # of one rollout, where the others have their scores
            yield self._failure(value, rollout) if is_error else self._checked(value, rollout)

    def _checked(self, value: Any, rollout: Rollout) -> float | _Failure | dict[str, float] | None:
        if value is None:
            return None
        if isinstance(value, Mapping):
            return self._checked_parts(value, rollout)
        if hasattr(value, "item") and hasattr(value, "shape") and tuple(value.shape) == ():
            value = value.item()  # a scalar of numpy or torch
        if not isinstance(value, numbers.Real | Decimal):
            hint = " Set reward.batched = true if the function takes a list." if isinstance(value, list) else ""
            raise RewardError(
                f"{self.name} must return a number, or None for no score, got {value!r} of type "
                f"{type(value).__name__} for prompt row {rollout.prompt.row}.{hint}"
            )
        try:
            score = float(value)
        except OverflowError:
            score = math.inf
        return score if math.isfinite(score) else _Failure("nan_score", f"returned {score}")

    def _checked_parts(self, values: Mapping[Any, Any], rollout: Rollout) -> dict[str, float] | _Failure | None:
        """Several named rewards: each a number; one without a score leaves the rollout without one."""
        parts: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, Mapping):
                raise RewardError(
                    f"{self.name} must return a number for each named reward, got {value!r} for {name!r} of prompt row "
                    f"{rollout.prompt.row}."
                )
            if str(name) in parts:
                raise RewardError(
                    f"{self.name} must return named rewards whose names differ as text, got {str(name)!r} twice in "
                    f"{list(values)} for prompt row {rollout.prompt.row}."
                )
            found = self._checked(value, rollout)
            if not isinstance(found, float):
                return found if isinstance(found, _Failure) else None
            parts[str(name)] = found
        if not parts:
            raise RewardError(
                f"{self.name} must return named rewards, got an empty dict for prompt row {rollout.prompt.row}."
            )
        total = sum(parts.values())
        return parts if math.isfinite(total) else _Failure("nan_score", f"returned rewards whose sum is {total}")

    def _failure(self, error: Exception, rollout: Rollout) -> _Failure:
        if not self._has_logged:
            self._has_logged = True
            logger.warning(
                "%s raised for prompt row %d (reward.on_error = %s). Further errors are not shown.",
                *(self.name, rollout.prompt.row, self._on_error),
                exc_info=error,
            )
        return _Failure("scorer_error", f"raised {type(error).__name__}: {error}", error)

    def _settle(self, rollout: Rollout, outcome: float | _Failure | dict[str, float] | None) -> Rollout:
        if outcome is None:
            return replace(rollout, reward=None, excluded="no_score")
        if isinstance(outcome, dict):
            return replace(rollout, reward=sum(outcome.values()), reward_parts=outcome)
        if not isinstance(outcome, _Failure):
            return replace(rollout, reward=outcome)
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

    def __call__(self, rollouts: Sequence[Rollout]) -> Scored:
        return Scored(tuple(rollouts), {})


def _name_zeros(scored: list[Rollout], failed: list[int]) -> None:
    """Where others of the batch have named rewards, a failed rollout that scores 0 scores 0 in each name."""
    names = next((rollout.reward_parts for rollout in scored if rollout.reward_parts), None)
    for place in failed if names else ():
        scored[place] = replace(scored[place], reward_parts=dict.fromkeys(names or (), 0.0))
