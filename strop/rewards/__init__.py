"""Scoring of rollouts: exact text, numbers, mathematics, the dataset's own scorer, or your function."""

from strop.rewards.answer import answer_key
from strop.rewards.length_penalty import penalise
from strop.rewards.make import label_check, make_scorer, scorer_source
from strop.rewards.scorer import Scored, Scorer

__all__ = ["Scored", "Scorer", "answer_key", "label_check", "make_scorer", "penalise", "scorer_source"]
