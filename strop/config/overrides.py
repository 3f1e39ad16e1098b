"""Overrides by dotted path or by a leaf name that occurs once, as the command line and Python give them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from strop.config import tree
from strop.config.base import Options
from strop.config.presets import ESTIMATOR_FLAG
from strop.types import ConfigError


def parse_flags(root: type[Options], args: Sequence[str]) -> dict[str, Any]:
    """`--a.b 1 --eps-clip=0.2 --overwrite` as option to text; a flag of a true/false option may stand alone."""
    found: dict[str, Any] = {}
    rest = list(args)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"{flag}: expected an option, such as --run.num_steps 20.")
        name, equals, value = flag[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif _is_switch(root, name):
                value = "true"
            else:
                raise ConfigError("\n".join(nest(root, {name: ""})[1]) or f"{flag} needs a value.")
        if name in found:
            raise ConfigError(f"{flag} is given twice.")
        found[name] = _parse(value)
    return found


def _parse(value: str) -> Any:
    """Lists and tables are read as TOML; everything else stays text and is converted by the option's type."""
    if value[:1] not in ("[", "{"):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{value!r} is not a TOML value: {error}.") from None


def _is_switch(root: type[Options], name: str) -> bool:
    return any(
        bool in (leaf.field.annotation, *get_args(leaf.field.annotation))
        for leaf in tree.leaves(root)
        if name in (leaf.path, leaf.name)
    )


def resolve(root: type[Options], name: str) -> str:
    """The dotted path that a name stands for; unknown names come back as they are."""
    if name == ESTIMATOR_FLAG:
        return "algorithm.preset"
    if "." in name or name in root.model_fields:
        return name
    found = tree.paths_named(root, name)
    return found[0] if len(found) == 1 else name


def nest(root: type[Options], overrides: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Overrides as nested tables, and what is wrong with their names."""
    nested: dict[str, Any] = {}
    given: dict[str, str] = {}
    problems: list[str] = []
    for name, value in overrides.items():
        path = resolve(root, name)
        problem = _name_problem(root, name, path)
        clash = next((p for p in given if p == path or p.startswith(f"{path}.") or path.startswith(f"{p}.")), None)
        if problem is not None:
            problems.append(problem)
        elif clash is not None:
            problems.append(f"{path} is set twice, as {given[clash]} and as {name}. Keep one of them.")
        else:
            given[path] = name
            _put(nested, path.split("."), value)
    return nested, problems


def _name_problem(root: type[Options], name: str, path: str) -> str | None:
    candidates = tree.paths_named(root, path) if "." not in path else []
    if len(candidates) > 1 and path not in root.model_fields:
        return f"--{name} is ambiguous: it may be {' or '.join(candidates)}. Write the whole path."
    if path in tree.paths(root) or path in tree.tables(root) or _below_free_table(root, path):
        return None
    return f"{name} is not an option. {tree.explain_unknown(root, path)}"


def _put(nested: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        nested = nested.setdefault(part, {})
    nested[parts[-1]] = value


def _below_free_table(root: type[Options], path: str) -> bool:
    """True below an option that is itself a free table, such as data.options.min_terms."""
    free = (leaf.path for leaf in tree.leaves(root) if str(leaf.field.annotation).startswith("dict"))
    return any(path.startswith(f"{table}.") for table in free)
