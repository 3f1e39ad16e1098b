"""Scoring of rollouts: exact text, numbers, mathematics, the dataset's own scorer, or your function."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.rewards.ahead import Ahead
    from strop.rewards.answer import answer_key
    from strop.rewards.length_penalty import penalise
    from strop.rewards.make import label_check, make_scorer, scorer_source
    from strop.rewards.scorer import Scored, Scorer
    from strop.rewards.stream import Stream

__all__ = [
    "Ahead",
    "Scored",
    "Scorer",
    "Stream",
    "answer_key",
    "label_check",
    "make_scorer",
    "penalise",
    "scorer_source",
]

_HOME = {"Ahead": "ahead", "answer_key": "answer", "penalise": "length_penalty", "Scored": "scorer", "Scorer": "scorer"}
_HOME["Stream"] = "stream"
_HOME |= dict.fromkeys(("label_check", "make_scorer", "scorer_source"), "make")


def __getattr__(name: str) -> Any:
    """Load a part when it is first used: a worker process, which needs few of them, starts in hundredths of a second."""
    if name not in _HOME:
        raise AttributeError(f"module 'strop.rewards' has no attribute {name!r}")
    return getattr(import_module(f"strop.rewards.{_HOME[name]}"), name)
