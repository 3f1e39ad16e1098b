"""The final answer of the response must be mathematically equal to the label."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from strop.rewards.label import LabelError, label_text, read_label
from strop.rewards.maths_process import MathsProcess
from strop.rewards.number import whole_number
from strop.types import Metric, Rollout, StepMetrics

MAX_ANSWER_CHARS = 300  # a longer answer is wrong unless it is the label itself
MAX_SEARCHED_CHARS = 2000  # of the end of a response that marks no answer

_BRACES = re.compile(r"\\boxed\s*\{|\\fbox\s*\{|\\.|[{}]", re.DOTALL)
_LEADING_NUMBER = re.compile(
    r"\s*\$?\s*([-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[-+]?\.[0-9]+)(?P<rest>.*)", re.DOTALL
)
_CONTINUES = re.compile(r"\s*[-+*/^\\=(%_:]|,\s*[-0-9(\\]|[A-Za-z]")  # after a number that is a part of the answer
_WORDS = re.compile(r"[A-Za-z]{3,}(?:\s+[A-Za-z]+)*")  # math-verify would take "god" for "dog": the same factors
_IN_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_WRAPPED = re.compile(r"\$\$(.+)\$\$|\$([^$]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)


class MathScore:
    r"""1 if the final answer of a response is mathematically equal to the label, else 0.

    The final answer is the content of the last complete \boxed{...}; without one, what follows the last "####" on its
    line; without that, what math-verify finds in the last 2000 characters. Equal texts and plain numbers are compared
    here, everything else by math-verify, in a process of its own that is stopped when an answer takes too long, so
    that no text a policy writes can hang a run: such an answer scores 0 and is counted in `reward/num_timeouts`.

    Raises:
        RewardError: the prompt has no label, an empty one, or one that is neither text nor a number.
    """

    def __init__(self) -> None:
        self._process = MathsProcess()
        self._num_timeouts = 0

    def __call__(self, rollout: Rollout) -> float:
        label = _label_answer(read_label(rollout.prompt, math_label))
        marked = marked_answer(rollout.text)
        answer = rollout.text[-MAX_SEARCHED_CHARS:] if marked is None else marked
        answer = _plain(answer)
        known = _compare_plain(answer, label)
        if known is not None:
            return float(known)
        if len(label) > MAX_ANSWER_CHARS or (marked is not None and len(answer) > MAX_ANSWER_CHARS):
            return 0.0
        is_equal = self._process.is_equal(label, answer, is_marked=marked is not None)
        self._num_timeouts += is_equal is None
        return float(bool(is_equal))

    def take_metrics(self) -> StepMetrics:
        """Counts since the last call."""
        num_timeouts, self._num_timeouts = self._num_timeouts, 0
        return {"reward/num_timeouts": Metric("sum", num_timeouts)}


def marked_answer(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}, else what follows the last "####"; None if neither is there.

    >>> marked_answer(r"First \boxed{3}, no, \boxed{\frac{1}{2}} it is.")
    '\\frac{1}{2}'
    >>> marked_answer("6 * 7 = 42\n#### 42 apples")
    '42'
    >>> marked_answer(r"\boxed{5") is None
    True
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, after = text.rpartition("####")
    return _first_answer(after) if mark else None


def final_answer(text: str) -> str | None:
    r"""The marked answer without its dress; None if none is marked.

    >>> final_answer(r"so \boxed{$\text{even}$}")
    'even'
    """
    marked = marked_answer(text)
    return None if marked is None else _plain(marked)


def _last_boxed(text: str) -> str | None:
    start = min((place for place in (text.find(r"\boxed"), text.find(r"\fbox")) if place >= 0), default=None)
    if start is None:
        return None
    last = None
    opened: list[int | None] = []  # for each open brace, where the content of its box begins; None for other braces
    for match in _BRACES.finditer(text, start):
        found = match[0]
        if found == "{":
            opened.append(None)
        elif found == "}":
            begin = opened.pop() if opened else None
            if begin is not None and (last is None or begin > last[0]):  # of nested boxes the inner one
                last = (begin, match.start())
        elif found.endswith("{") and len(found) > 2:
            opened.append(match.end())
    return None if last is None else text[slice(*last)]


def _first_answer(after: str) -> str:
    """What follows "####": the number with which it begins if that stands alone, else the line."""
    line = after.strip().partition("\n")[0].replace("\u2212", "-")
    number = _LEADING_NUMBER.match(line[: 2 * MAX_ANSWER_CHARS])
    if number and (len(line) > MAX_ANSWER_CHARS or not _CONTINUES.match(number["rest"])):
        return number[1]
    return line


def _plain(answer: str) -> str:
    r"""Without the dress: white space, a final full stop, dollar signs around, \text{...}, a Unicode minus."""
    answer = answer.replace("\u2212", "-").strip()
    wrapped = _WRAPPED.fullmatch(answer.removesuffix("."))
    if wrapped:
        answer = next(part for part in wrapped.groups() if part is not None).strip()
    return _IN_TEXT.sub(r"\1", answer).strip() if _IN_TEXT.fullmatch(answer) else answer


def _compare_plain(answer: str, label: str) -> bool | None:
    """Whether two answers are equal as texts or numbers; None if it takes mathematics to tell."""
    if answer == label:
        return True
    if _WORDS.fullmatch(label):
        return answer.casefold().split() == label.casefold().split()
    if len(answer) > MAX_ANSWER_CHARS or "%" in answer + label:
        return None
    found, right = whole_number(answer), whole_number(label)
    if found is None or right is None:
        return None
    if found == right:
        return True
    return False if found == found.to_integral_value() and right == right.to_integral_value() else None


def math_label(label: Any) -> str:
    """The text of a label. Raises LabelError."""
    text = label_text(label, "math").strip()
    if not text:
        raise LabelError(
            "the label must be an answer for reward.kind = math, got empty text. Add the answer to the data."
        )
    return text


@lru_cache(maxsize=4096)
def _label_answer(label: str) -> str:
    marked = marked_answer(label)
    return _plain(marked) if marked else _plain(label)
