"""How a run begins: anew, or from a checkpoint; and what a resumed run may do otherwise than the one before it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from strop.config import tree
from strop.config.base import Options
from strop.config.overrides import resolve, with_underscores
from strop.types import ConfigError

_CHECKPOINT = re.compile(r"step_\d{6,}")
_WORDS = ("newest", "auto", "best")
CHOICES = f"{', '.join(_WORDS)}, or the name of a checkpoint, such as step_000040"


def is_resume_word(text: str) -> bool:
    """Whether this may follow --resume."""
    return text in _WORDS or _CHECKPOINT.fullmatch(text) is not None


def resume_word(resume: bool | str) -> str | None:
    """What a run goes on from; None where it begins anew. True stands for the newest checkpoint.

    Raises:
        ConfigError: it is another word.
    """
    if resume is False:
        return None
    word = "newest" if resume is True else resume
    if not is_resume_word(word):
        raise ConfigError(f"resume must be {CHOICES}, got {word!r}.")
    return word


def allowed_changes(root: type[Options], names: Sequence[str], *, resumes: bool) -> frozenset[str]:
    """The options and tables that --allow-change names, each as a whole path.

    Raises:
        ConfigError: a name is none of an option or a table, or there is nothing to resume.
    """
    if names and not resumes:
        raise ConfigError("--allow-change must come with --resume: only a run that is resumed has options to change.")
    found = [resolve(root, with_underscores(root, name.removeprefix("--"))) for name in names]
    known = {*tree.paths(root), *tree.tables(root)}
    problems = [
        f"--allow-change must name an option or a table, got {name!r}. {tree.explain_unknown(root, path)}"
        for name, path in zip(names, found, strict=True)
        if tree.general(root, path) not in known
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return frozenset(found)


def is_allowed(path: str, allowed: frozenset[str]) -> bool:
    """Whether an option is among those that may change, by itself or by a table that it lies in.

    >>> is_allowed("data.path", frozenset({"data"})), is_allowed("data.path", frozenset({"trainer.lr"}))
    (True, False)
    """
    return any(f"{path}.".startswith(f"{name}.") for name in allowed)


def needed_to_change(path: str) -> tuple[str, ...]:
    """What must be allowed for an option to change. From some the order of the data follows, and only `data` begins it anew.

    >>> needed_to_change("trainer.lr"), needed_to_change("data.shuffle"), needed_to_change("seed")
    (('trainer.lr',), ('data',), ('seed', 'data'))
    """
    if path.startswith(("data.", "curriculum.")):
        return ("data",)
    return (path, "data") if path == "seed" else (path,)
