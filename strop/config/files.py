"""What a config names on disk, looked at before anything heavy is imported: everything that is missing is said at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from strop.config.root import RootConfig, TrainConfig
from strop.config.tree import values
from strop.types import ConfigError


def check_files(config: RootConfig, *, trains: bool = True) -> None:
    """Model folder, data files and scorer file are there, and responses fit the positions that the model's config names.

    Args:
        config: of any command.
        trains: False where only what is evaluated will be read.

    Raises:
        ConfigError: with every problem, one a line.
    """
    problems = [*_model(config.model.path), *_data(config, trains), *_scorer(config), *_recorded(config)]  # type: ignore[attr-defined]
    problems += _lengths(config, trains)
    if problems:
        raise ConfigError("\n".join(problems))


def _model(path: str) -> Iterator[str]:
    if not path.strip():
        yield f"model.path must be a Hugging Face folder or name, got {path!r}."
    elif Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        yield f"model.path must be a folder with a model in it, got {path}: it has no config.json."
    elif not Path(path).is_dir() and _is_meant_as_folder(path) and not (Path(path).parent / "config.toml").is_file():
        yield f"model.path must be a Hugging Face folder or name, got {path!r}: there is no such folder. {_relative_to(path)}"

    # In a run folder a model that is not there is told of where it is known what the run is at.


def _is_meant_as_folder(path: str) -> bool:
    """A name of the hub is one word, or two with a slash between them."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/")


def _relative_to(path: str) -> str:
    return "" if Path(path).is_absolute() else f"Relative paths are taken from {Path.cwd()}."


def _data(config: RootConfig, trains: bool) -> Iterator[str]:
    for option, value in values(config).items():
        table, _, name = option.rpartition(".")
        if name != "path" or table == "model" or not table.endswith("data") or (table == "data" and not trains):
            continue
        if not str(value).strip():
            yield f"{option} must be a file, got {value!r}."
        elif not Path(value).exists():
            yield f"{option} must be a file, got {value}: there is no such file. {_relative_to(value)}"
        elif Path(value).is_dir():
            yield f"{option} must be a file, got {value}: it is a folder."


def _scorer(config: RootConfig) -> Iterator[str]:
    function = getattr(getattr(config, "reward", None), "function", "")
    file = function.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        rule = "reward.function must be module:function or file.py:function"
        yield f"{rule}, got {function}: there is no file {file}. {_relative_to(file)}"


def _recorded(config: RootConfig) -> Iterator[str]:
    folder = config.rollout.from_folder if isinstance(config, TrainConfig) else None
    if folder is not None and not Path(folder).is_dir():
        yield f"rollout.from_folder must be a folder of rollouts, got {folder}: there is no such folder. {_relative_to(folder)}"
    elif folder is not None and _is_written_by(config, Path(folder)):
        yield (
            f"rollout.from_folder must lie outside of what the run writes, got {folder} with run.folder = {config.folder}. "
            "Name another run.folder."
        )


def _is_written_by(config: RootConfig, folder: Path) -> bool:
    """Would the run replace what it is to learn from?"""
    run = config.folder.resolve()
    read = (folder / "rollouts" if (folder / "rollouts").is_dir() else folder).resolve()
    return any(read.is_relative_to(run / name) for name in ("rollouts", "guards"))


def _lengths(config: RootConfig, trains: bool) -> Iterator[str]:
    if not isinstance(config, TrainConfig):
        return
    limit = _positions(config.model.path)
    asked: dict[str, int | None] = {"eval.max_response_tokens": config.eval.max_response_tokens}
    sets = config.eval.sets
    asked |= {f"eval.sets.{name}.max_response_tokens": own.max_response_tokens for name, own in sets.items()}
    if trains or any(own.max_response_tokens is None for own in config.eval.all_sets.values()):
        asked["rollout.max_response_tokens"] = config.rollout.max_response_tokens
    for option, length in asked.items():
        if limit is not None and length is not None and length >= limit:
            yield (
                f"{option} must be below the {limit} positions of the model at {config.model.path}, less the longest prompt, "
                f"got {length}."
            )


def _positions(folder: str) -> int | None:
    """Of the model's own config; None where it does not say, which is for the model to find out."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = found.get("text_config", found) if isinstance(found, dict) else {}
    limit = None if found.get("alibi") else found.get("max_position_embeddings")  # alibi's number is no limit
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None
