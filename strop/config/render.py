"""A config as TOML that loads again, with the origin of each value beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tomlkit

from strop.config.base import Derived, Options
from strop.config.root import SFTConfig, TrainConfig
from strop.config.tree import options_in, tables_in

_HEADER = "Every option of the run, and where its value comes from. This file can be run again."


def to_toml(config: TrainConfig | SFTConfig) -> str:
    """The resolved config. None is written as "none", which loads as None."""
    folder = str(config.folder)  # with {name} put in: run again, this file stands for the same run
    resolved = config.model_copy(update={"run": config.run.model_copy(update={"folder": folder})})
    document = tomlkit.document()
    document.add(tomlkit.comment(_HEADER))
    derived = config.all_derived()
    _fill(document, resolved, "", lambda path: said_of(config, path, derived))
    return tomlkit.dumps(document)


def said_of(config: TrainConfig | SFTConfig, path: str, derived: Mapping[str, Derived]) -> str:
    """Where the value of an option comes from, and what it stands for where that follows from another (`derived`: all that
    does, of this config)."""
    if path not in derived:
        return config.origin(path)
    return f"{config.origin(path)}; derived: {derived[path].value}, from {derived[path].source}"


def recorded_origins(text: str) -> dict[str, str] | None:
    """Path to origin, of the options of a file that `to_toml` wrote; None for any other file."""
    if not text.startswith(f"# {_HEADER}"):
        return None
    return dict(_comments(tomlkit.parse(text), ""))


def _comments(container: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for name in container:
        item = container.item(name)
        comment = item.trivia.comment.lstrip("# ")
        if comment:
            yield prefix + name, comment.partition("; derived: ")[0]
        else:  # a table of options; a free table has a comment of its own
            yield from _comments(item.value, f"{prefix}{name}.")


def _fill(container: Any, options: Options, prefix: str, said: Callable[[str], str]) -> None:
    for name, value in options_in(options):
        item = tomlkit.item("none" if value is None else list(value) if isinstance(value, tuple) else value)
        item.comment(" ".join(said(prefix + name).split()))
        container.add(name, item)
    above: dict[str, Any] = {}  # of the tables with names of the user's
    for path, below in tables_in(options):
        table = tomlkit.table()
        _fill(table, below, f"{prefix}{path}.", said)
        name, _, own = path.partition(".")
        if not own:
            container.add(name, table)
            continue
        if name not in above:
            above[name] = tomlkit.table(is_super_table=True)
            container.add(name, above[name])
        above[name].add(own, table)
