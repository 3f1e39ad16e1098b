"""What slime's users know, on strop's mathematics: two losses under their names, their reward functions and their filters.

    from strop.compat.slime import compute_cispo_loss, compute_policy_loss

Needs torch, nothing else, and that for the losses alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strop.compat.slime.filters import DynamicFilterOutput, SlimeGroupFilter
from strop.compat.slime.modules import provide_slime_types
from strop.compat.slime.reward import SlimeArgs, SlimeReward
from strop.compat.slime.sample import Sample

if TYPE_CHECKING:
    from strop.compat.slime.losses import compute_cispo_loss, compute_policy_loss

__all__ = [
    "DynamicFilterOutput",
    "Sample",
    "SlimeArgs",
    "SlimeGroupFilter",
    "SlimeReward",
    "compute_cispo_loss",
    "compute_policy_loss",
    "provide_slime_types",
]


def __getattr__(name: str) -> Any:
    """Load the losses, and torch with them, when they are first used: a reward function needs neither."""
    if name not in ("compute_cispo_loss", "compute_policy_loss"):
        raise AttributeError(f"module 'strop.compat.slime' has no attribute {name!r}")
    return getattr(import_module("strop.compat.slime.losses"), name)
