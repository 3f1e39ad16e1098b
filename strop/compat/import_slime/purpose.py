"""What a launch script of slime is for: reinforcement learning, or training on demonstrations."""

from __future__ import annotations

from strop.compat.import_slime.draft import Given
from strop.compat.import_slime.script import Script
from strop.types import UserError


def is_sft(given: Given) -> bool:
    """Whether a launch trains on demonstrations: its loss is sft_loss, or its rollouts are those of slime's sft_rollout."""
    return given.text("--loss-type") == "sft_loss" or "sft_rollout" in given.text("--rollout-function-path")


def purpose_of(given: Given, script: Script, name: str) -> str:
    """What the script is, in words.

    Raises:
        UserError: it is no reinforcement learning, and a config of strop train would be another run than it describes.
    """
    launch = f"{script.program}, line {script.line}"
    if is_sft(given):
        raise UserError(
            f"{name} trains on demonstrations (SFT; {launch}) and strop import-slime writes configs of reinforcement "
            "learning alone. Write a config for strop sft: strop help --sft lists its options."
        )
    estimator = given.text("--advantage-estimator", "grpo")
    return f"{name} is reinforcement learning with {estimator} ({launch})."
