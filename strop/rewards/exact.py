"""The response must be the label, letter for letter."""

from __future__ import annotations

from strop.rewards.label import required_label
from strop.types import Rollout


def exact_score(rollout: Rollout, *, strip: bool) -> float:
    """1 if the response equals the label and ended by itself, else 0.

    Args:
        rollout: its `text` is compared with str(label).
        strip: ignore white space around both.

    Returns:
        0.0 or 1.0; always 0.0 if the response was cut off, since its end is not the policy's.

    Raises:
        RewardError: the prompt has no label.
    """
    text, label = rollout.text, str(required_label(rollout.prompt, "exact"))
    if strip:
        text, label = text.strip(), label.strip()
    return float(text == label and rollout.finish_reason == "stop")
