"""How one prompt becomes rollouts."""

from strop.rollout.budget import TokenBudget
from strop.rollout.filters import Filtered, Filters, filter_source
from strop.rollout.in_time import all_in_time, end_tasks, not_there
from strop.rollout.seeds import mix_seed
from strop.rollout.single_turn import sample_group

__all__ = [
    "Filtered",
    "Filters",
    "TokenBudget",
    "all_in_time",
    "end_tasks",
    "filter_source",
    "mix_seed",
    "not_there",
    "sample_group",
]
