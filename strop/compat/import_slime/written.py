"""Writes values of options as TOML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tomlkit

from strop.config import RootConfig, tree


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Tables in tables, from dotted options.

    >>> nested({"eval.data.path": "a"})
    {'eval': {'data': {'path': 'a'}}}
    """
    found: dict[str, Any] = {}
    for path, value in values.items():
        *tables, last = path.split(".")
        table = found
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return found


def plain(value: Any) -> Any:
    """A value as TOML has it."""
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """A value as a line of TOML has it."""
    if isinstance(value, dict):
        return f"{{ {len(value)} values }}"
    return tomlkit.item(plain(value)).as_string()


def document(root: type[RootConfig], values: dict[str, Any], comments: Sequence[str]) -> str:
    """The file: comments, and the options in the order of their tree."""
    found = tomlkit.document()
    for comment in comments:
        found.add(tomlkit.comment(comment))
    places = {path: place for place, path in enumerate(tree.paths(root))}
    order = sorted(values, key=lambda path: places[tree.general(root, path)])
    _fill(found, nested({path: plain(values[path]) for path in order}))
    return tomlkit.dumps(found)


def _fill(container: Any, values: dict[str, Any]) -> None:
    direct = [name for name, value in values.items() if not isinstance(value, dict)]
    for name in sorted(direct, key=lambda name: name != "kind"):
        container.add(name, values[name])
    for name, value in values.items():
        if isinstance(value, dict):
            table = tomlkit.table()
            _fill(table, value)
            container.add(name, table)
