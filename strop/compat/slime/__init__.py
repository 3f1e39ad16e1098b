"""What slime's users know, on strop's mathematics: two losses under their names, their reward functions and their filters.

    from strop.compat.slime import compute_cispo_loss, compute_policy_loss

Needs torch, nothing else.
"""

from strop.compat.slime.filters import DynamicFilterOutput, SlimeGroupFilter
from strop.compat.slime.losses import compute_cispo_loss, compute_policy_loss
from strop.compat.slime.modules import provide_slime_types
from strop.compat.slime.reward import SlimeArgs, SlimeReward
from strop.compat.slime.sample import Sample

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
