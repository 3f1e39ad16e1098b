"""What is different between a run that is resumed and the one that wrote the checkpoint, and whether it may be."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

from strop import __version__
from strop.config import RootConfig
from strop.config.resuming import is_allowed, needed_to_change
from strop.config.tree import values
from strop.observe.console import Console
from strop.observe.metrics_file import read_metrics
from strop.types import ConfigError

# Options, or whole tables, that change nothing of what the next steps compute: where things lie (what lies there is
# compared by content), how long to go on, what is measured, and how work is cut.
_MAY_CHANGE = (
    "run.",
    "eval.",
    "validation.",
    "guards.",
    "engine.",
    "data.path",
    "model.path",
    "model.device",
    "model.trust_remote_code",
    "critic.path",
)
_MAY_CHANGE += ("trainer.num_threads", "trainer.max_tokens_per_micro_batch", "trainer.layout")
_MAY_CHANGE += ("trainer.activation_checkpointing", "trainer.num_processes", "trainer.process_timeout_s")
_MAY_CHANGE += ("trainer.kind", "trainer.tensor_parallel", "trainer.context_parallel")
_MAY_CHANGE += ("trainer.pipeline_parallel", "trainer.distributed_optimizer")
_MAY_CHANGE += ("rollout.max_tokens_in_flight", "rollout.timeout_s", "rollout.num_scorers", "filter.max_rounds")
_MAY_CHANGE += ("distillation.request_timeout_s", "distillation.num_retries")
# Names that others begin with. What they bring is compared: a teacher by its weights.
_MAY_CHANGE_ITSELF = ("distillation.teacher", "distillation.teachers")
_MAY_CHANGE_ITSELF += ("distillation.teacher_dtype", "distillation.teacher_device")
_OF_SCORERS = ("num_workers", "timeout_s", "memory_limit_mb")  # of a table reward: they keep functions from hanging
_NEVER_CHANGES = ("lora.rank", "lora.target_modules")  # what learns, and so what a checkpoint holds


@dataclass(frozen=True)
class Change:
    """An option that is not what it was, as --allow-change allows."""

    option: str
    was: Any
    now: Any

    @property
    def restarts_data(self) -> bool:
        return "data" in needed_to_change(self.option)


def allowed_differences(config: RootConfig, before: Mapping[str, Any], allowed: frozenset[str]) -> list[Change]:
    """A resumed run is the same run: what would change its steps must be as it was, or be allowed to change.

    Args:
        config: of the run that is resumed.
        before: the decisive options as the checkpoint has them.
        allowed: options and tables that may change.

    Raises:
        ConfigError: it is not, with every option that differs.
    """
    now = json.loads(json.dumps(decisive(config)))  # tuples as the lists that the file has
    paths = [path for path in dict.fromkeys([*before, *now]) if before.get(path) != now.get(path)]
    found = [Change(path, before.get(path), now.get(path)) for path in paths]
    refused = [change for change in found if not _is_confirmed(change, allowed)]
    if refused:
        raise ConfigError("\n".join(_refusal(change) for change in refused))
    return found


def _is_confirmed(change: Change, allowed: frozenset[str]) -> bool:
    is_possible = change.option not in _NEVER_CHANGES
    return is_possible and all(is_allowed(name, allowed) for name in needed_to_change(change.option))


def _refusal(change: Change) -> str:
    must = f"{change.option} must be {_word(change.was)} as in the run that is resumed, got {_word(change.now)}. "
    if change.option in _NEVER_CHANGES:
        return (
            f"{must}Set it back, or start a new run from that run's model: the checkpoint holds the weights that learned, and "
            "with this change others would."
        )
    flags = " ".join(f"--allow-change {name}" for name in needed_to_change(change.option))
    anew = ", which begins the data anew" if change.restarts_data else ""
    return f"{must}Set it back, confirm the change with {flags}{anew}, or start a new run from that run's model."


def decisive(config: RootConfig) -> dict[str, Any]:
    """The options that the next steps depend on."""
    found = values(config)
    return {
        path: value
        for path, value in found.items()
        if not path.startswith(_MAY_CHANGE) and path not in _MAY_CHANGE_ITSELF and not is_of_scorer(path, found)
    }


def is_of_scorer(path: str, found: Mapping[str, Any]) -> bool:
    """Is this an option of the processes that score, from which no score follows? Of a program (kind = code) its limits are
    what it is scored by. `found`: all options and their values."""
    table, _, name = path.rpartition(".")
    return name in _OF_SCORERS and f".{table}".endswith(".reward") and found.get(f"{table}.kind") != "code"


def tell_of_changes(file: Path, step: int, changes: Sequence[Change], console: Console) -> None:
    """Show the changes that a run goes on with after a step, and add them to its file of changes, which forgets those of
    steps that are made again. The file is replaced whole."""
    rows: Iterable[dict[str, Any]] = [row for row in read_metrics(file) if row["step"] < step]
    lines = [json.dumps(row) for row in [*rows, *({"step": step, **asdict(change)} for change in changes)]]
    for change in changes:
        console.note(f"changed from step {step + 1} on: {change.option} = {_word(change.now)}, was {_word(change.was)}")
    if lines or file.exists():
        beside = file.with_name(f".{file.name}.new")
        beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        beside.replace(file)


def warn_of_schedule(config: RootConfig, *, num_steps: int, num_steps_then: int, console: Console) -> None:
    """Say so where a schedule of a learning rate was told another number of steps."""
    schedules = [value for path, value in values(config).items() if path.endswith(".lr_schedule")]
    falling = [schedule for schedule in schedules if schedule != "constant"]
    if num_steps_then != num_steps and falling:
        console.warn(
            f"the run has {num_steps} steps and had {num_steps_then}: the {falling[0]} schedule ends later or "
            "earlier than the steps made so far were told."
        )


def versions() -> dict[str, str]:
    """Of what computes the steps."""
    return {
        "strop": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }


def warn_of_versions(before: Mapping[str, str], console: Console) -> None:
    """Say so where a checkpoint was written by other versions: its next steps may come out otherwise in their last digits."""
    differ = list(_other_versions(before))
    if differ:
        console.warn(f"the checkpoint was written with {', '.join(differ)}: steps may differ in their last digits.")


def _other_versions(before: Mapping[str, str]) -> Iterator[str]:
    for name, now in versions().items():
        if before.get(name, now) != now:
            yield f"{name} {before[name]} (here {now})"


def _word(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
