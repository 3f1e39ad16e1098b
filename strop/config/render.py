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
    derived = config.all_derived()
    return "\n".join([f"# {_HEADER}", *_lines(resolved, "", lambda path: said_of(config, path, derived)), ""])


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


def _lines(options: Options, prefix: str, said: Callable[[str], str]) -> Iterator[str]:
    """The options of a table, then the tables below it, each under its whole name."""
    for name, value in options_in(options):
        yield f"{name} = {_value(value)} # {' '.join(said(prefix + name).split())}"
    for path, below in tables_in(options):
        name, _, own = path.partition(".")
        table = f"{name}.{tomlkit.key(own).as_string()}" if own else name  # one with a name of the user's
        yield from ("", f"[{prefix}{table}]", *_lines(below, f"{prefix}{table}.", said))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        free = tomlkit.inline_table()
        free.update(value)
        return free.as_string()
    return tomlkit.item("none" if value is None else list(value) if isinstance(value, tuple) else value).as_string()
