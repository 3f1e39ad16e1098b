"""The last number of the response must equal the label."""

from __future__ import annotations

import re
from decimal import Decimal, Overflow, localcontext
from typing import Any

from strop.rewards.label import LabelError, label_text, read_label
from strop.types import Rollout

# A minus belongs to the number only if nothing stands before it that it could subtract from.
_SIGN = r"(?<![0-9A-Za-z_)\]}])[-+]\$?"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_NUMBER = re.compile(rf"(?P<sign>{_SIGN})?(?P<digits>{_DIGITS})(?P<exponent>[eE][-+]?[0-9]{{1,3}}(?![0-9]))?")
_MINUS = str.maketrans("\u2212", "-")


def number_score(rollout: Rollout, *, tolerance: float) -> float:
    """1 if the last number of the response equals the label, else 0.

    score = 1 if |last number - label| <= tolerance else 0

    Numbers are compared in decimal, so that integers of any length and 0.1 are what they say. Commas between groups of
    three digits, a dollar sign before and a percent sign after are passed over; a Unicode minus counts as a minus.

    Args:
        rollout: its `text` is searched.
        tolerance: largest absolute difference that still counts as equal.

    Returns:
        0.0 or 1.0; 0.0 where the response has no number.

    Raises:
        RewardError: the prompt has no label, or one that is not a number.
    """
    label = read_label(rollout.prompt, number_label)
    value = last_number(rollout.text)
    if value is None:
        return 0.0
    return float(value == label or _distance(value, label) <= Decimal(repr(tolerance)))


def _distance(one: Decimal, other: Decimal) -> Decimal:
    """Infinity where it has more digits before the point than a Decimal holds, about a million."""
    with localcontext() as context:
        context.traps[Overflow] = False
        return abs(one - other)


def last_number(text: str) -> Decimal | None:
    """The last number in a text; None if there is none.

    >>> last_number("3 boxes at $1,234.50 each.")
    Decimal('1234.50')
    >>> last_number("7-3"), last_number("x = -3")
    (Decimal('3'), Decimal('-3'))
    """
    last = None
    for match in _NUMBER.finditer(text.translate(_MINUS)):
        last = match
    return None if last is None else _value(last)


def whole_number(text: str) -> Decimal | None:
    """The number that a text consists of, white space, dollar and percent signs aside; None if it is anything else.

    >>> whole_number(" $1,234.00 ")
    Decimal('1234.00')
    >>> whole_number("3 apples") is None
    True
    """
    bare = text.translate(_MINUS).strip().removesuffix("%").rstrip()
    match = _NUMBER.fullmatch(bare) or _NUMBER.fullmatch(bare.removeprefix("$"))
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Decimal:
    sign = "-" if "-" in (match["sign"] or "") else ""
    return Decimal(sign + match["digits"].replace(",", "") + (match["exponent"] or ""))


def number_label(label: Any) -> Decimal:
    """The number that a label is. Raises LabelError."""
    value = whole_number(label_text(label, "number"))
    if value is None:
        raise LabelError(
            f"the label must be a number for reward.kind = number, got {label!r:.200}. "
            "Mend it, name another column in label_key, or use reward.kind = exact or math."
        )
    return value
