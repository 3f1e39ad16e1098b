"""The right answer of a prompt: what the scorers that compare can compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeVar

from strop.types import Prompt, RewardError

T = TypeVar("T")


class LabelError(ValueError):
    """A label that cannot be compared with; the message does not say where it stands."""


def label_text(label: Any, kind: str) -> str:
    """A label as text; it must be text or a number that is one.

    >>> label_text(5, "number")
    '5'

    Raises:
        LabelError: there is none, or it is a list, an object, true, false, infinite or NaN.
    """
    if label is None:
        raise LabelError(
            f"there must be a label for reward.kind = {kind}, got none. Name its column in label_key, or use another reward."
        )
    if not isinstance(label, str) and not _is_finite_number(label):
        raise LabelError(f"the label must be text or a finite number for reward.kind = {kind}, got {label!r:.200}.")
    return str(label)


def _is_finite_number(label: Any) -> bool:
    if isinstance(label, int):
        return not isinstance(label, bool)
    return (isinstance(label, float) and math.isfinite(label)) or (isinstance(label, Decimal) and label.is_finite())


def read_label(prompt: Prompt, read: Callable[[Any], T]) -> T:
    """What `read` makes of the label of a prompt.

    Raises:
        RewardError: it is a LabelError; the message names the prompt's row.
    """
    try:
        return read(prompt.label)
    except LabelError as error:
        raise RewardError(f"prompt row {prompt.row}: {error}") from None
