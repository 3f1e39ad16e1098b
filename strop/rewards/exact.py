"""The response must be the label, letter for letter."""

from __future__ import annotations

from typing import Any

from strop.rewards.label import label_text, read_label
from strop.types import Rollout


def exact_score(rollout: Rollout, *, strip: bool) -> float:
    """1 if the response equals the label and ended by itself, else 0.

    Args:
        rollout: its `text` is compared with str(label).
        strip: ignore white space around both.

    Returns:
        0.0 or 1.0; always 0.0 if the response was cut off, since its end is not the policy's.

    Raises:
        RewardError: the prompt has no label, or one that is neither text nor a number.
    """
    text, label = rollout.text, read_label(rollout.prompt, exact_label)
    if strip:
        text, label = text.strip(), label.strip()
    return float(text == label and rollout.finish_reason == "stop")


def exact_label(label: Any) -> str:
    """The text that the response must equal. Raises LabelError."""
    return label_text(label, "exact")
