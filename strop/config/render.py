"""A config as TOML that loads again, with the origin of each value beside it."""

from __future__ import annotations

from typing import Any

import tomlkit

from strop.config.base import Options
from strop.config.root import SFTConfig, TrainConfig


def to_toml(config: TrainConfig | SFTConfig) -> str:
    """The resolved config. None is written as "none", which loads as None."""
    folder = str(config.folder)  # with {name} put in: run again, this file stands for the same run
    resolved = config.model_copy(update={"run": config.run.model_copy(update={"folder": folder})})
    document = tomlkit.document()
    document.add(
        tomlkit.comment("Every option of the run, and where its value comes from. This file can be run again.")
    )
    _fill(document, resolved, "", config)
    return tomlkit.dumps(document)


def said_of(config: TrainConfig | SFTConfig, path: str) -> str:
    """Where the value of an option comes from, and what it stands for where that follows from another."""
    derived = config.all_derived().get(path)
    if derived is None:
        return config.origin(path)
    return f"{config.origin(path)}; derived: {derived.value}, from {derived.source}"


def _fill(container: Any, options: Options, prefix: str, config: TrainConfig | SFTConfig) -> None:
    plain = [(name, value) for name, value in options if not isinstance(value, Options)]
    for name, value in plain:
        item = tomlkit.item("none" if value is None else list(value) if isinstance(value, tuple) else value)
        if not isinstance(value, dict):
            item.comment(" ".join(said_of(config, prefix + name).split()))
        container.add(name, item)
    for name, value in options:
        if isinstance(value, Options):
            table = tomlkit.table()
            _fill(table, value, f"{prefix}{name}.", config)
            container.add(name, table)
