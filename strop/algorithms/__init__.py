"""Objectives: `strop.ops` put together as the options say, and printed as a formula."""

from strop.algorithms.binding import ADVANTAGES, POLICY_LOSSES, Binding, bind
from strop.algorithms.formula import objective_formula
from strop.algorithms.likelihood import LikelihoodObjective
from strop.algorithms.objective import Objective, PolicyObjective, TrainableTokens

__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "Binding",
    "LikelihoodObjective",
    "Objective",
    "PolicyObjective",
    "TrainableTokens",
    "bind",
    "objective_formula",
]
