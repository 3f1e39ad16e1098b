"""How one prompt becomes rollouts."""

from strop.rollout.budget import TokenBudget
from strop.rollout.filters import Filtered, Filters, filter_source
from strop.rollout.seeds import mix_seed
from strop.rollout.single_turn import sample_group

__all__ = ["Filtered", "Filters", "TokenBudget", "filter_source", "mix_seed", "sample_group"]
