"""How one prompt becomes rollouts."""

from strop.rollout.seeds import mix_seed
from strop.rollout.single_turn import sample_group

__all__ = ["mix_seed", "sample_group"]
