"""Training on rollouts that were recorded: which files they are in, and whether they fit the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.config import TrainConfig
from strop.observe.console import Console
from strop.observe.rollout_file import read_rollouts, step_files
from strop.runtime.models import check_length, vocab_size
from strop.types import ConfigError, DataError, Rollout

ABOUT = "about.json"  # beside the files of steps: what they were sampled with


def about(config: TrainConfig) -> dict[str, Any]:
    """What a folder of rollouts says of itself."""
    rollout = config.rollout
    return {
        "rollout_format": 1,
        "model": config.model.path,
        "seed": config.seed,
        "temperature": rollout.temperature,
        "prompts_per_step": rollout.prompts_per_step,
        "group_size": rollout.group_size,
        "max_response_tokens": rollout.max_response_tokens,
    }


def write_about(folder: Path, config: TrainConfig) -> None:
    """Make a folder that rollouts can be written to, and say in it what they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).write_text(json.dumps(about(config), indent=1) + "\n", encoding="utf-8")


class RecordedRollouts:
    """The rollouts of each step, from a file of its own, read when its turn comes.

    Args:
        files: step to file.
        prompts_per_step: how many groups each file must have.
    """

    def __init__(self, files: Mapping[int, Path], *, prompts_per_step: int) -> None:
        self.files = dict(files)
        self.prompts_per_step = prompts_per_step
        self._model: Any = None

    def check(self, model: Any) -> None:
        """Hold every token against this model's vocabulary from now on, those of the first file at once."""
        self._model = model
        self.of_step(min(self.files))

    def of_step(self, step: int) -> list[Rollout]:
        """The rollouts of a step, their groups numbered as those of that step.

        Raises:
            DataError: the file is broken, or does not fit the run or the model.
        """
        path = self.files[step]
        rollouts = read_rollouts(path)
        numbers = {group: place for place, group in enumerate(dict.fromkeys(r.group_id for r in rollouts))}
        if len(numbers) != self.prompts_per_step:
            raise DataError(
                f"{path}: the file must have rollout.prompts_per_step = {self.prompts_per_step} groups, got {len(numbers)}. "
                "Record with the same rollout.prompts_per_step, or set it to what was recorded."
            )
        self._check_tokens(path, rollouts)
        first = (step - 1) * self.prompts_per_step
        return [replace(r, group_id=first + numbers[r.group_id]) for r in rollouts]

    def _check_tokens(self, path: Path, rollouts: Sequence[Rollout]) -> None:
        if self._model is None:
            return
        size = vocab_size(self._model)
        for line, rollout in enumerate(rollouts, 1):
            wrong = [token for token in rollout.tokens if not 0 <= token < size]
            if wrong:
                raise DataError(
                    f"{path}:{line}: token ids must be from 0 to {size - 1}, the model's vocabulary, got {wrong[0]}. Use the "
                    "model that the rollouts were sampled from, or one with its tokenizer."
                )
            check_length(self._model, f"{path}:{line}", len(rollout.tokens))


def open_recorded(config: TrainConfig, console: Console) -> RecordedRollouts | None:
    """The rollouts of `rollout.from_folder`; None where the run samples its own.

    Raises:
        UserError: there are too few, or they were sampled in another way than this run would.
    """
    if config.rollout.from_folder is None:
        return None
    folder = folder_of(Path(config.rollout.from_folder))
    files = dict(enumerate((path for _, path in step_files(folder)), 1))
    if not files:
        raise ConfigError(
            f"rollout.from_folder must be a folder with files step_NNNNNN.jsonl, got {folder}: it has none. strop train and "
            "strop rollout write them."
        )
    if config.run.num_steps > len(files):
        raise ConfigError(
            f"run.num_steps must be at most {len(files)}, the steps that rollout.from_folder = {folder} has, got "
            f"{config.run.num_steps}. Set --num-steps {len(files)}."
        )
    _compare(config, folder, console)
    return RecordedRollouts(files, prompts_per_step=config.rollout.prompts_per_step)


def folder_of(folder: Path) -> Path:
    """A folder of rollouts, or that in a run folder."""
    return folder / "rollouts" if (folder / "rollouts").is_dir() else folder


def _compare(config: TrainConfig, folder: Path, console: Console) -> None:
    """Hold what the folder says of itself against the config."""
    path = folder / ABOUT
    try:
        then = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(
            f"rollout.from_folder must be a folder that says in {ABOUT} what its rollouts were sampled with, got {folder}: "
            "there is no such file. Rollouts of a run of before strop recorded them cannot be trained on."
        ) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: the file is broken: {error}.") from error
    now, names = about(config), ("temperature", "prompts_per_step", "group_size")
    if missing := [name for name in names if name not in then]:
        raise DataError(f"{path}: the file is broken: it does not say {', '.join(missing)}.")
    wrong = [name for name in names if then[name] != now[name]]
    if wrong:
        raise ConfigError(
            "\n".join(
                f"rollout.{name} must be {then[name]} as in {path}, got {now[name]}. Set it to what was recorded."
                for name in wrong
            )
        )
    if then.get("model") != now["model"]:
        console.warn(
            f"{folder} was sampled from {then.get('model')}, and model.path = {now['model']}: ratios do not begin at 1."
        )
