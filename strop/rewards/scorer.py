"""Applies a scoring function to rollouts: only real numbers become rewards, and what fails follows one policy."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from strop.rewards.ahead import Ahead, AskAhead
from strop.rewards.reading import ElsewhereError, Failure, Outcome, Score, ScoreReader
from strop.rewards.stream import Stream
from strop.types import Group, Metric, RewardError, Rollout, StepMetrics

logger = logging.getLogger("strop")

OnError = Literal["fail", "zero", "exclude"]
Ask = Callable[[Sequence[Rollout], Callable[[int], object]], Iterable[Outcome]]
_STOPPED = {
    "scorer_timeout": "reward/num_timeouts",
    "scorer_crash": "reward/num_crashes",
    "scorer_out_of_memory": "reward/num_out_of_memory",
}


@dataclass(frozen=True, slots=True)
class Scored:
    """Rollouts in the order they came, each with a reward or a reason why it has none."""

    rollouts: tuple[Rollout, ...]
    metrics: StepMetrics


class Scorer:
    """Scores what the policy wrote.

    A reward of None leaves the statistics and the loss; `excluded` says why: "no_score" (the function returned None), or what
    a `Failure` is called (on_error = "exclude"). A rollout that is excluded already is passed through. Metrics:
    `reward/num_errors` (every failure), where calls have limits how many of those were timeouts, crashes or out of memory,
    and `reward/num_excluded`.

    Args:
        ask: takes rollouts, and what to tell how many are done; gives an outcome for each.
        name: of the scorer, for messages.
        on_error: for a failure: raise RewardError, score 0.0 (in each name, where others of the batch have named rewards), or
            leave the rollout out.
        has_limits: calls may be stopped, which is counted.
        metrics: called after each batch for counts of the scorer's own.
        close: ends what it holds open.
        ask_ahead: the same as `ask` for rollouts that are yet to come, where others do the scoring.

    >>> from strop.types import Prompt
    >>> prompt = Prompt(row=0, tokens=(5,), text="2+3=", label="5")
    >>> rollout = Rollout(prompt, 0, 0, (5, 9), (False, True), (0.0, -0.5), (-1, 0), "stop", text="5")
    >>> scored = Scorer(one_by_one(lambda rollout: len(rollout.text), "length"), "length")([rollout])
    >>> scored.rollouts[0].reward
    1.0
    """

    def __init__(
        self,
        ask: Ask,
        name: str,
        on_error: OnError = "fail",
        *,
        has_limits: bool = False,
        metrics: Callable[[], StepMetrics] | None = None,
        close: Callable[[], None] | None = None,
        ask_ahead: AskAhead | None = None,
    ) -> None:
        self.name = name
        self._ask, self._on_error, self._has_limits, self._metrics = ask, on_error, has_limits, metrics
        self._close, self._ask_ahead, self._has_logged = close, ask_ahead, False

    def __call__(self, rollouts: Sequence[Rollout], advance: Callable[[int], object] = lambda done: None) -> Scored:
        """Score rollouts. `advance` is told how many are done.

        Raises:
            RewardError: on_error = "fail" and there is a failure; or, whatever on_error says, the function breaks its
                contract: not a number, or not as many values as rollouts.
        """
        asked = [rollout for rollout in rollouts if rollout.excluded is None]
        return self._settle_all(rollouts, self._ask(asked, advance))

    @contextmanager
    def ahead(self, advance: Callable[[int], object]) -> Iterator[Ahead | None]:
        """Score rollouts while others are sampled, in other processes; None where this process scores, which is better done
        when all are there. What is not done at the end is ended."""
        if self._ask_ahead is None:
            yield None
            return
        ahead = Ahead(self._ask_ahead, self._settle_all, advance)
        try:
            yield ahead
        finally:
            ahead.close()

    def stream(self, take: Callable[[Group, Scored], object], fail: Callable[[BaseException], object]) -> Stream | None:
        """Score groups as they come, in other processes, and hand each over when it is scored; None where this process
        scores. To be closed."""
        return None if self._ask_ahead is None else Stream(self._ask_ahead, self._settle_all, take, fail)

    def _settle_all(self, rollouts: Sequence[Rollout], found: Iterable[Outcome]) -> Scored:
        outcomes = iter(found)
        scored: list[Rollout] = []
        failed: dict[int, Failure] = {}
        for place, rollout in enumerate(rollouts):
            outcome = None if rollout.excluded else next(outcomes)
            if isinstance(outcome, Failure):
                failed[place] = outcome
                self._log(outcome, rollout)
            scored.append(rollout if rollout.excluded else self._settle(rollout, outcome))
        if self._on_error == "zero":
            _name_zeros(scored, failed)
        metrics: StepMetrics = {
            "reward/num_errors": Metric("sum", len(failed)),
            "reward/num_excluded": Metric("sum", sum(rollout.excluded is not None for rollout in scored)),
        }
        for word, name in _STOPPED.items() if self._has_limits else ():
            metrics[name] = Metric("sum", sum(failure.excluded == word for failure in failed.values()))
        return Scored(tuple(scored), metrics | (self._metrics() if self._metrics else {}))

    def outcomes(self, rollouts: Sequence[Rollout]) -> tuple[list[Outcome], StepMetrics]:
        """What was scored, for a scorer in another process, and this one's own counts."""
        found = [_portable(outcome) for outcome in self._ask(rollouts, lambda done: None)]
        return found, self._metrics() if self._metrics else {}

    def spread(self, ask: Ask, metrics: Callable[[], StepMetrics], close: Callable[[], None]) -> Scorer:
        """This scorer, with outcomes and counts that come from elsewhere."""
        return Scorer(ask, self.name, self._on_error, has_limits=self._has_limits, metrics=metrics, close=close)

    def close(self) -> None:
        """End what the scorer holds open, such as processes."""
        if self._close is not None:
            self._close()

    def _log(self, failure: Failure, rollout: Rollout) -> None:
        if self._has_logged or failure.excluded == "nan_score":
            return
        self._has_logged = True
        logger.warning(
            "%s %s for prompt row %d (reward.on_error = %s). Further errors are not shown.",
            *(self.name, failure.reason, rollout.prompt.row, self._on_error),
            exc_info=failure.error,
        )

    def _settle(self, rollout: Rollout, outcome: Outcome) -> Rollout:
        if outcome is None:
            return replace(rollout, reward=None, excluded="no_score")
        if isinstance(outcome, Score):
            parts, by_token = outcome.parts, outcome.token_rewards
            return replace(rollout, reward=outcome.reward, reward_parts=parts, token_rewards=by_token)
        if self._on_error == "fail":
            raise RewardError(
                f"{self.name} must return a finite number, or None for no score, but it {outcome.reason} for prompt "
                f"row {rollout.prompt.row}, sample {rollout.sample}. Mend it,{outcome.advice and f' {outcome.advice},'} or set "
                "reward.on_error = zero or exclude."
            ) from outcome.error
        if self._on_error == "zero":
            return replace(rollout, reward=0.0)
        return replace(rollout, reward=None, excluded=outcome.excluded)


def _portable(outcome: Outcome) -> Outcome:
    """An outcome whose error another process can read: it has the text of the traceback."""
    if not isinstance(outcome, Failure) or outcome.error is None or isinstance(outcome.error, ElsewhereError):
        return outcome
    return replace(outcome, error=ElsewhereError("".join(traceback.format_exception(outcome.error))))


class Unscored(Scorer):
    """Leaves rollouts as they are: a teacher alone says what is learned, and there is nothing to count."""

    def __init__(self) -> None:
        super().__init__(lambda rollouts, advance: [None] * len(rollouts), "none")

    def __call__(self, rollouts: Sequence[Rollout], advance: Callable[[int], object] = lambda done: None) -> Scored:
        return Scored(tuple(rollouts), {})


def one_by_one(score: Callable[[Rollout], Any], name: str) -> Ask:
    """Asks a scorer of strop's own, in this process, lazily: what fails is met before others are asked."""
    reader = ScoreReader(name)

    def one(rollout: Rollout) -> Outcome:
        try:
            return reader.read(score(rollout), rollout)
        except RewardError:  # the data lacks what the scorer needs
            raise
        except Exception as error:  # noqa: BLE001  a dataset's scorer may raise anything; on_error decides
            return Failure("scorer_error", f"raised {type(error).__name__}: {error}", error)

    def ask(rollouts: Sequence[Rollout], advance: Callable[[int], object]) -> Iterator[Outcome]:
        for done, rollout in enumerate(rollouts):
            outcome = one(rollout)
            advance(done + 1)
            yield outcome

    return ask


def _name_zeros(scored: list[Rollout], failed: Iterable[int]) -> None:
    """Where others of the batch have named rewards, a failed rollout that scores 0 scores 0 in each name."""
    names = next((rollout.reward_parts for rollout in scored if rollout.reward_parts), None)
    for place in failed if names else ():
        scored[place] = replace(scored[place], reward_parts=dict.fromkeys(names or (), 0.0))
