"""The right answer of a prompt, where a scorer cannot do without."""

from __future__ import annotations

from typing import Any

from strop.types import Prompt, RewardError


def required_label(prompt: Prompt, kind: str) -> Any:
    """The label, which is not None.

    >>> required_label(Prompt(row=0, tokens=(5,), text="2+3=", label=5), "number")
    5
    """
    if prompt.label is None:
        raise RewardError(
            f"data.label_key must name a column with the right answer for reward.kind = {kind}, "
            f"got no label in prompt row {prompt.row}. Add the label to the data, or take another kind of reward."
        )
    return prompt.label
