"""Overrides by dotted path or by a short name, as the command line and Python give them.

A short name is an option's last name alone, such as eps_clip. It means the option of that name outside [eval] and
[validation], if there is exactly one; an option of those is written whole (eval.top_p), and so is one of [critic] that
another table has too (critic.lr; --lr is the policy's). In `strop eval` it is the other way round: where [eval] has
an option of that name, that one is meant.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from strop.config import tree
from strop.config.base import FlagText, Options
from strop.config.presets import ESTIMATOR_FLAG
from strop.types import ConfigError

_WHOLE_DISTRIBUTION = "training samples from the whole distribution"
# Flags of single commands, which are easily given to another one.
_OF_COMMANDS = {
    "resume": "strop train and strop sft",
    "allow_change": "strop train and strop sft",
    "json": "strop eval",
    "show": "strop eval",
    "diff": "strop explain",
    "all": "strop audit",
    "only": "strop audit",
    "from_rollouts": "strop train",
    "output": "strop rollout and strop import-slime",
    "step": "strop replay",
    "sft": "strop explain, strop audit, strop help and strop schema",
}
_WHY_EVAL_ALONE = {"top_p": _WHOLE_DISTRIBUTION, "top_k": _WHOLE_DISTRIBUTION}


def parse_flags(root: type[Options], args: Sequence[str], *, is_eval: bool = False) -> dict[str, Any]:
    """`--a.b 1 --eps-clip=0.2 --overwrite` as option to text; a flag of a true/false option may stand alone.

    Args:
        root: the tree of options.
        args: the words of the command line.
        is_eval: short names are those of `strop eval`.

    Returns:
        The text of each option as it was written, lists and tables as TOML reads them; below a free table, whose options
        have no types of their own (data.options.min_terms), any value that TOML can read.
    """
    found: dict[str, Any] = {}
    rest = list(args)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"{flag}: expected an option, such as --run.num_steps 20.")
        name, equals, value = flag[2:].partition("=")
        name = with_underscores(root, name)
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif _is_switch(root, resolve(root, name, is_eval=is_eval)):
                value = "true"
            else:
                problems = nest(root, {name: ""}, is_eval=is_eval)[1]
                raise ConfigError("\n".join(problems) or f"{flag} needs a value.")
        if name in found:
            raise ConfigError(f"{flag} is given twice.")
        found[name] = _parse_free(value) if _below_free_table(root, name) else _parse(value)
    return found


def with_underscores(root: type[Options], name: str) -> str:
    """--eps-clip as eps_clip. A name that the user gave a table stays as it is."""
    table = tree.named(root, name)
    return name.replace("-", "_") if table is None else table + name.removeprefix(table).replace("-", "_")


def _parse(value: str) -> Any:
    """Lists and tables are read as TOML; everything else stays text and is converted by the option's type."""
    if value[:1] not in ("[", "{"):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError) as error:  # beside bad TOML, numbers of thousands of digits
        raise ConfigError(f"{value[:200]!r} is not a TOML value: {error}.") from None


def _parse_free(value: str) -> Any:
    """A value as TOML reads it (true, 3, 0.5, a list, a quoted text); what is not TOML stays text."""
    try:
        found = tomllib.loads(f"table = {{value = {value}}}")  # in braces, where "3 # x" and "1, 2" are no values
    except (ValueError, RecursionError):
        return value
    is_one_value = list(found) == ["table"] and list(found["table"]) == ["value"]
    return found["table"]["value"] if is_one_value else value


def _is_switch(root: type[Options], path: str) -> bool:
    return any(
        bool in (leaf.field.annotation, *get_args(leaf.field.annotation))
        for leaf in tree.leaves(root)
        if leaf.path == tree.general(root, path)
    )


def resolve(root: type[Options], name: str, *, is_eval: bool = False) -> str:
    """The dotted path that a name stands for; unknown and ambiguous names come back as they are."""
    if name == ESTIMATOR_FLAG:
        return "algorithm.preset"
    if "." in name or name in root.model_fields:
        return name
    found = _meanings(root, name, is_eval)
    return found[0] if len(found) == 1 else name


def _meanings(root: type[Options], name: str, is_eval: bool) -> list[str]:
    """The options that a short name may stand for."""
    found = tree.paths_named(root, name)
    of_eval = [path for path in found if path.startswith(("eval.", "validation."))]
    if is_eval and of_eval:
        return of_eval
    others = [path for path in found if path not in of_eval]
    return [path for path in others if not path.startswith("critic.")] or others


def nest(
    root: type[Options], overrides: Mapping[str, Any], *, is_eval: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Overrides as nested tables, and what is wrong with their names. With is_eval, short names are those of `strop eval`."""
    nested: dict[str, Any] = {}
    given: dict[str, str] = {}
    problems: list[str] = []
    for name, given_value in overrides.items():
        value = os.fspath(given_value) if isinstance(given_value, os.PathLike) else given_value
        path = resolve(root, name, is_eval=is_eval)
        if isinstance(value, str) and not _below_free_table(root, path):
            value = FlagText(value)
        problem = _name_problem(root, name, path, is_eval)
        clash = next((p for p in given if p == path or p.startswith(f"{path}.") or path.startswith(f"{p}.")), None)
        if problem is not None:
            problems.append(problem)
        elif clash is not None:
            problems.append(f"{path} is set twice, as {given[clash]} and as {name}. Keep one of them.")
        else:
            given[path] = name
            _put(nested, path.split("."), value)
    return nested, problems


def _name_problem(root: type[Options], name: str, path: str, is_eval: bool) -> str | None:
    general = tree.general(root, path)
    if general in tree.paths(root) or general in tree.tables(root) or _below_free_table(root, path):
        return None
    candidates = _meanings(root, path, is_eval) if "." not in path else []
    if len(candidates) > 1:
        return f"--{name} is ambiguous: it may be {' or '.join(candidates)}. Write the whole path."
    if "." not in path and tree.paths_named(root, path):
        reason = _WHY_EVAL_ALONE.get(name, "training has no such option")
        return f"{name} is valid as {' or '.join(tree.paths_named(root, name))}; write the whole path: {reason}."
    if name in _OF_COMMANDS:
        return (
            f"--{name.replace('_', '-')} is no option of a config and no flag here: it is one of {_OF_COMMANDS[name]}."
        )
    return f"{name} is not an option. {tree.explain_unknown(root, path)}"


def _put(nested: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        nested = nested.setdefault(part, {})
    nested[parts[-1]] = value


def _below_free_table(root: type[Options], path: str) -> bool:
    """True below an option that is itself a free table, such as data.options.min_terms."""
    below = tree.general(root, path)
    return any(below.startswith(f"{table}.") for table in tree.free_tables(root))
