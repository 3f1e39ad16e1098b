"""Objectives: `strop.ops` put together as the options say, and printed as a formula."""

from strop.algorithms.binding import Binding, bind
from strop.algorithms.formula import objective_formula
from strop.algorithms.likelihood import LikelihoodObjective, likelihood_formula
from strop.algorithms.objective import Objective, PolicyObjective, ScoredTokens, TrainableTokens
from strop.algorithms.variants import ADVANTAGES, CORRECTIONS, POLICY_LOSSES

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "POLICY_LOSSES",
    "Binding",
    "LikelihoodObjective",
    "Objective",
    "PolicyObjective",
    "ScoredTokens",
    "TrainableTokens",
    "bind",
    "likelihood_formula",
    "objective_formula",
]
