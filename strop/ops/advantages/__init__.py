"""Advantages from rewards, computed over whole groups and steps before anything is cut."""

from strop.ops.advantages.baselines import maxrl, opo, pass_at_k, rloo
from strop.ops.advantages.gae import EstimatedAdvantages, gae
from strop.ops.advantages.gdpo import gdpo
from strop.ops.advantages.group import group_advantages
from strop.ops.advantages.process import process_advantages
from strop.ops.advantages.returns import (
    discounted_returns,
    last_token_rewards,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from strop.ops.advantages.whiten import whiten

__all__ = [
    "EstimatedAdvantages",
    "discounted_returns",
    "gae",
    "gdpo",
    "group_advantages",
    "last_token_rewards",
    "maxrl",
    "opo",
    "pass_at_k",
    "process_advantages",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "whiten",
]
