"""Which final answer a response gives, in a form in which equal answers are equal: what maj@k counts."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from strop.config.sampling import ExactRewardOptions, MathRewardOptions, NumberRewardOptions, RewardOptions
from strop.rewards.maths import final_answer
from strop.rewards.number import last_number, whole_number
from strop.types import Rollout


def answer_key(options: RewardOptions) -> Callable[[Rollout], Hashable | None]:
    """What tells two answers apart, by the scorer: the last number, the final answer of mathematics, the whole response where
    it is compared letter for letter; for every other scorer the text. None where a response has no final answer.

    >>> from strop.types import Prompt
    >>> def said(text):
    ...     return Rollout(Prompt(0, (5,), ""), 0, 0, (5, 9), (False, True), (0.0, -0.5), (-1, 0), "stop", text=text)
    >>> key = answer_key(NumberRewardOptions())
    >>> key(said("so 7.0")) == key(said("It is 7.")), key(said("no idea"))
    (True, None)
    """
    match options:
        case NumberRewardOptions():
            return lambda rollout: last_number(rollout.text)
        case MathRewardOptions():
            return lambda rollout: _maths(rollout.text)
        case ExactRewardOptions():
            return lambda rollout: _whole(rollout, strip=options.strip)
        case _:
            return lambda rollout: rollout.text.strip() or None


def _maths(text: str) -> Hashable | None:
    """The marked answer, as a number where it is one; without a mark the last number, else the text."""
    answer = final_answer(text)
    if answer is None:
        number = last_number(text)
        return number if number is not None else text.strip() or None
    number = whole_number(answer)
    return number if number is not None else "".join(answer.split()) or None


def _whole(rollout: Rollout, *, strip: bool) -> str | None:
    """A response that was cut off has no end of its own, and no answer."""
    if rollout.finish_reason != "stop":
        return None
    return rollout.text.strip() if strip else rollout.text
