"""What a session writes into a checkpoint and takes back from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.config import RootConfig
from strop.config.tree import values
from strop.observe.console import Console
from strop.observe.metrics_file import drop_metrics_after, read_metrics
from strop.rewards import scorer_source
from strop.rollout import filter_source
from strop.runtime.best import restore_best
from strop.runtime.checkpoints import newest_checkpoint, write_checkpoint
from strop.runtime.models import has_finite_weights
from strop.runtime.session import Session
from strop.runtime.waiting import read_waiting, write_waiting
from strop.types import ConfigError, DataError, GuardError, ModelError

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
_MAY_CHANGE += ("rollout.max_tokens_in_flight", "rollout.timeout_s", "filter.max_rounds")
_MAY_CHANGE += ("reward.num_workers", "reward.timeout_s", "reward.memory_limit_mb")
_MAY_CHANGE += ("distillation.request_timeout_s", "distillation.num_retries")
# Names that others begin with. What they bring is compared: a teacher by its weights.
_MAY_CHANGE_ITSELF = ("distillation.teacher", "distillation.teachers")
_MAY_CHANGE_ITSELF += ("distillation.teacher_dtype", "distillation.teacher_device")


def save_checkpoint(session: Session) -> None:
    """All that the next step needs; random numbers follow from the seed and the step.

    Raises:
        GuardError: the weights are not finite. Nothing is written.
    """
    if not has_finite_weights(session.loaded.model) or not _has_finite_critic(session):
        raise GuardError(f"the weights are not finite after step {session.step}; no checkpoint was written.")
    state = {
        "cursor": session.place.cursor,
        "num_prompts_sampled": session.place.num_prompts_sampled,
        "objective": session.objective.state(),
        "guards": session.guards.state(),
        "prompts": session.prompts_fingerprint,
        "scorer": scorer_source(session.config.reward),
        "filters": filter_source(session.config.filter),
        "teachers": None if session.teachers is None else session.teachers.fingerprints,
        "num_steps": session.config.run.num_steps,
        "best": None if session.best is None else asdict(session.best),
        "config": decisive(session.config),
    }

    def save(folder: Path) -> None:
        session.trainer.save(folder)
        write_waiting(folder, session.place.waiting)
        if session.critic is not None:
            session.critic.save(folder)

    keep = session.config.run.keep_checkpoints
    write_checkpoint(session.folder.checkpoints, session.step, save=save, state=state, keep=keep)
    session.saved_step = session.step


def _has_finite_critic(session: Session) -> bool:
    return session.critic is None or has_finite_weights(session.critic.model)


def restore(session: Session) -> None:
    """Go back to the newest complete checkpoint of the run folder.

    Raises:
        UserError: there is none, or it belongs to another config, another model or other data.
    """
    path, state = newest_checkpoint(session.folder.checkpoints, warn=session.console.warn)
    config, console = session.config, session.console
    check_config(config, state["config"])
    warn_of_schedule(config, num_steps=config.run.num_steps, num_steps_then=state["num_steps"], console=console)
    if state["prompts"] != session.prompts_fingerprint:
        raise DataError(
            f"data: the prompts are not those that {path} was trained on. "
            "Give it the file, columns and tokenizer that the run began with, or start a new run from its model."
        )
    _check_teachers(session, state.get("teachers"), path)
    if state["scorer"] != scorer_source(session.config.reward):
        session.console.warn(
            "the file of reward.function has changed since the checkpoint was written: scores may differ."
        )
    if state["filters"] != filter_source(session.config.filter):
        session.console.warn(
            "a file of filter.group or filter.rollout has changed since the checkpoint was written: other groups may stay."
        )
    restore_learners(session, path, state)
    session.cursor.load_state(state["cursor"])
    session.num_prompts_sampled = state["num_prompts_sampled"]
    session.waiting = read_waiting(path, session.prompts)
    if "guards" in state:  # absent in checkpoints of before they remembered anything
        session.guards.load_state(state["guards"])
    session.mark_place()
    session.step = state["step"]
    session.saved_step = session.step
    drop_metrics_after(session.folder.metrics, session.step)
    session.history = read_metrics(session.folder.metrics)
    restore_best(session, state.get("best"))  # absent in checkpoints of before there was one
    num_lines = sum(row["step"] > 0 for row in session.history)
    if num_lines != session.step:
        session.console.warn(f"metrics.jsonl has lines of {num_lines} of the {session.step} steps made.")
    session.console.note(f"resumed from {path} after step {session.step}")


def restore_learners(session: Session, path: Path, state: Mapping[str, Any]) -> None:
    """All that learns as a checkpoint has it."""
    session.trainer.load(path)
    if session.critic is not None:
        session.critic.load(path)
    session.objective.load_state(state["objective"])
    if session.engine is not None:
        session.engine.policy_version = session.trainer.num_steps


def _check_teachers(session: Session, before: Mapping[str, str] | None, path: Path) -> None:
    """Refuse other teachers than those that the run began with, wherever they lie now."""
    now = None if session.teachers is None else session.teachers.fingerprints
    if before == now:
        return
    names = sorted({*(before or {}), *(now or {})})
    source = next(name for name in names if (before or {}).get(name) != (now or {}).get(name))
    raise ModelError(
        f"distillation.teacher{f's.{source}' if source else ''} must be the teacher that {path} was trained with: weights and "
        "type of weights, or the name that its server gives it. Set it back, or start a new run from this run's model."
    )


def check_config(config: RootConfig, before: Mapping[str, Any]) -> None:
    """A resumed run is the same run: what would change its steps must be as it was.

    Raises:
        ConfigError: it is not, with every option that differs.
    """
    differences = list(_differences(config, before))
    if differences:
        raise ConfigError(
            "\n".join(
                f"{path} must be {_word(was)} as in the run that is resumed, got {_word(now)}. "
                "Set it back, or start a new run from that run's model."
                for path, was, now in differences
            )
        )


def warn_of_schedule(config: RootConfig, *, num_steps: int, num_steps_then: int, console: Console) -> None:
    """Say so where a schedule of a learning rate was told another number of steps."""
    schedules = [value for path, value in values(config).items() if path.endswith(".lr_schedule")]
    falling = [schedule for schedule in schedules if schedule != "constant"]
    if num_steps_then != num_steps and falling:
        console.warn(
            f"the run has {num_steps} steps and had {num_steps_then}: the {falling[0]} schedule ends later or "
            "earlier than the steps made so far were told."
        )


def _differences(config: RootConfig, before: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    now = json.loads(json.dumps(decisive(config)))  # tuples as the lists that the file has
    for path in dict.fromkeys([*before, *now]):
        if before.get(path) != now.get(path):
            yield path, before.get(path), now.get(path)


def decisive(config: RootConfig) -> dict[str, Any]:
    """The options that the next steps depend on."""
    return {
        path: value
        for path, value in values(config).items()
        if not path.startswith(_MAY_CHANGE) and path not in _MAY_CHANGE_ITSELF
    }


def _word(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
