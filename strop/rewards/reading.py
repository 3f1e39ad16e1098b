"""Reads what a scoring function returned: a number, several named ones, or numbers for tokens or turns."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NoReturn

from strop.rewards.places import Places, added, placed, tokens_of_policy, total
from strop.types import RewardError, Rollout, TokenRewards, TurnRewards

Per = Literal["response", "turn", "token"]


@dataclass(frozen=True, slots=True)
class Score:
    """What a rollout earned: all of it, by name without weights, and by token."""

    reward: float
    parts: dict[str, float] | None = None
    token_rewards: Places | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """No score, because of `error`, because the score is not finite, or because the function was stopped.

    `excluded` is one word for what happened: "scorer_error", "nan_score", "scorer_timeout", "scorer_crash" or
    "scorer_out_of_memory". `advice` says what may help beside mending the function.
    """

    excluded: str
    reason: str
    error: BaseException | None = None
    advice: str = ""


class ElsewhereError(Exception):
    """What a function raised in another process: the traceback there, as text."""

    def __str__(self) -> str:
        return f"in another process:\n{self.args[0]}"


Outcome = Score | Failure | None  # of a rollout; None: the function gave no score


@dataclass(frozen=True, slots=True)
class ScoreReader:
    """Reads the scores of one function.

    Args:
        name: of the function, for messages.
        per: what the numbers of a list belong to; "response" takes no list.
        weights: of named rewards, by name; empty: they are not weighed, and any names will do.
    """

    name: str
    per: Per = "response"
    weights: Mapping[str, float] | None = None

    def read(self, value: Any, rollout: Rollout) -> Score | Failure | None:
        """The score of a rollout; None where the function gave none.

        Raises:
            RewardError: the function breaks its contract: something that is no number, names or lengths that do not fit.
        """
        if value is None:
            return None
        if isinstance(value, Mapping):
            return self._read_parts(value, rollout)
        if self.weights:
            self._refuse(
                f"named rewards as a dict, those of reward.weights: {_list(self.weights)}", value, rollout, hint=""
            )
        if self.per != "response" and not self._has_places(value):
            hint = " Return a list, or set reward.per = response."
            self._refuse(f"one number for each {self.per} (reward.per = {self.per})", value, rollout, hint=hint)
        found = self._read_part(value, rollout)
        if found is None or isinstance(found, Failure):
            return found
        return _finite(Score(found, None) if isinstance(found, float) else Score(total(found), None, found))

    def _read_parts(self, values: Mapping[Any, Any], rollout: Rollout) -> Score | Failure | None:
        """Several named rewards; one without a score leaves the rollout without one."""
        found: dict[str, float | Places] = {}
        for name, value in zip(self._checked_names(values, rollout), values.values(), strict=True):
            part = self._read_part(value, rollout, of=f" for {name!r}")
            if part is None or isinstance(part, Failure):
                return part
            found[name] = part
        weights = {name: (self.weights or {}).get(name, 1.0) for name in found}
        parts = {name: part if isinstance(part, float) else total(part) for name, part in found.items()}
        plain = sum(weights[name] * part for name, part in found.items() if isinstance(part, float))
        rows = [_scaled(part, weights[name]) for name, part in found.items() if not isinstance(part, float)]
        at = tokens_of_policy(rollout)
        if not rows or not at:
            return _finite(Score(plain, parts))
        if any(isinstance(part, float) for part in found.values()):  # a number for the whole response lands at its end
            rows.append(tuple(plain if place == at[-1] else None for place in range(len(rollout.tokens))))
        places = added(rows)
        return _finite(Score(total(places), parts, places))

    def _checked_names(self, values: Mapping[Any, Any], rollout: Rollout) -> list[str]:
        names, row = [str(name) for name in values], rollout.prompt.row
        if not names:
            raise RewardError(f"{self.name} must return named rewards, got an empty dict for prompt row {row}.")
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise RewardError(
                f"{self.name} must return named rewards whose names differ as text, got {twice!r} twice in {list(values)} "
                f"for prompt row {row}."
            )
        if self.weights and set(names) != set(self.weights):
            raise RewardError(
                f"{self.name} must return the named rewards of reward.weights, {_list(self.weights)}, got {_list(names)} for "
                f"prompt row {row}. Give every name a weight, and return every name each time; a weight of 0 only shows it."
            )
        return names

    def _read_part(self, value: Any, rollout: Rollout, *, of: str = "") -> float | Places | Failure | None:
        """A number, or what it gives to each token."""
        if value is None:
            return None
        if not self._has_places(value):
            return self._number(value, rollout, of=of)
        given = value
        if not isinstance(given, TokenRewards | TurnRewards):
            given = TokenRewards(value) if self.per == "token" else TurnRewards(value)
        where = "token" if isinstance(given, TokenRewards) else "turn"
        if not isinstance(given.values, Iterable) or isinstance(given.values, str | bytes | Mapping | Set):
            self._refuse(f"one number for each {where}{of}", given.values, rollout, hint="")
        checked: list[float | None] = []
        for place, number in enumerate(given.values):
            found = None if number is None else self._number(number, rollout, of=f"{of} at {where} {place}")
            if isinstance(found, Failure):
                return found
            checked.append(found)
        try:
            places = placed(rollout, type(given)(checked))
        except ValueError as error:
            raise RewardError(f"{self.name} must return {error}{_at(rollout)}") from None
        return places if any(x is not None for x in places) else None

    def _has_places(self, value: Any) -> bool:
        """Is it a number for each of several tokens or turns?"""
        if isinstance(value, TokenRewards | TurnRewards):
            return True
        is_array = hasattr(value, "shape") and tuple(value.shape) != ()
        return self.per != "response" and (isinstance(value, list | tuple) or is_array)

    def _number(self, value: Any, rollout: Rollout, *, of: str) -> float | Failure:
        if hasattr(value, "item") and hasattr(value, "shape") and tuple(value.shape) == ():
            value = value.item()  # a scalar of numpy or torch
        if not isinstance(value, numbers.Real | Decimal):
            hint = (
                " Set reward.batched = true if the function takes a list, or reward.per if it rewards tokens or turns."
            )
            self._refuse(f"a number, or None for no score{of and ','}{of}", value, rollout, hint=hint)
        try:
            score = float(value)
        except OverflowError:
            score = math.inf
        return score if math.isfinite(score) else Failure("nan_score", f"returned {score}{of}")

    def _refuse(self, wanted: str, value: Any, rollout: Rollout, *, hint: str) -> NoReturn:
        hint = hint if isinstance(value, list | tuple) or self.per != "response" else ""
        raise RewardError(
            f"{self.name} must return {wanted}, got {value!r:.200} of type {type(value).__name__} for prompt row "
            f"{rollout.prompt.row}.{hint}"
        )


def _finite(score: Score) -> Score | Failure:
    if math.isfinite(score.reward):
        return score
    return Failure("nan_score", f"returned rewards whose sum is {score.reward}")


def _scaled(places: Places, weight: float) -> Places:
    """What is only shown, by a weight of 0, is no reward of any token: a 0 would count as a step."""
    if weight == 0:
        return (None,) * len(places)
    return tuple(None if value is None else weight * value for value in places)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _at(rollout: Rollout) -> str:
    return f" (prompt row {rollout.prompt.row}, sample {rollout.sample})."
