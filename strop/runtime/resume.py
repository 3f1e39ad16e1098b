"""What a session writes into a checkpoint and takes back from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.config import TrainConfig
from strop.config.tree import values
from strop.observe.metrics_file import drop_metrics_after, read_metrics
from strop.rewards import scorer_source
from strop.runtime.checkpoints import newest_checkpoint, write_checkpoint
from strop.runtime.models import has_finite_weights
from strop.runtime.session import Session
from strop.types import ConfigError, DataError, GuardError, ModelError

# Options, or whole tables, that change nothing of what the next steps compute: where things lie (what lies there is
# compared by content), how long to go on, what is measured, and how work is cut.
_MAY_CHANGE = (
    "run.",
    "eval.",
    "guards.",
    "engine.",
    "data.path",
    "model.path",
    "model.device",
    "model.trust_remote_code",
)
_MAY_CHANGE += ("trainer.num_threads", "trainer.max_tokens_per_micro_batch", "trainer.layout")
_MAY_CHANGE += ("distillation.request_timeout_s", "distillation.num_retries")
# Names that others begin with. What they bring is compared: a teacher by its weights.
_MAY_CHANGE_ITSELF = ("distillation.teacher", "distillation.teachers")
_MAY_CHANGE_ITSELF += ("distillation.teacher_dtype", "distillation.teacher_device")


def save_checkpoint(session: Session) -> None:
    """All that the next step needs; random numbers follow from the seed and the step.

    Raises:
        GuardError: the weights are not finite. Nothing is written.
    """
    if not has_finite_weights(session.loaded.model):
        raise GuardError(f"the weights are not finite after step {session.step}; no checkpoint was written.")
    state = {
        "cursor": session.cursor_state,
        "objective": session.objective.state(),
        "prompts": session.prompts_fingerprint,
        "scorer": scorer_source(session.config.reward),
        "teachers": None if session.teachers is None else session.teachers.fingerprints,
        "num_steps": session.config.run.num_steps,
        "config": _decisive(session.config),
    }
    keep = session.config.run.keep_checkpoints
    write_checkpoint(session.folder.checkpoints, session.step, save=session.trainer.save, state=state, keep=keep)
    session.saved_step = session.step


def restore(session: Session) -> None:
    """Go back to the newest complete checkpoint of the run folder.

    Raises:
        UserError: there is none, or it belongs to another config, another model or other data.
    """
    path, state = newest_checkpoint(session.folder.checkpoints, warn=session.console.warn)
    _check_config(session, state["config"], state["num_steps"])
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
    session.trainer.load(path)
    session.engine.policy_version = session.trainer.num_steps
    session.cursor.load_state(state["cursor"])
    session.objective.load_state(state["objective"])
    session.cursor_state, session.step = state["cursor"], state["step"]
    session.saved_step = session.step
    drop_metrics_after(session.folder.metrics, session.step)
    session.history = read_metrics(session.folder.metrics)
    if len(session.history) != session.step:
        session.console.warn(f"metrics.jsonl has lines of {len(session.history)} of the {session.step} steps made.")
    session.console.note(f"resumed from {path} after step {session.step}")


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


def _check_config(session: Session, before: Mapping[str, Any], num_steps: int) -> None:
    """A resumed run is the same run: what would change its steps must be as it was."""
    differences = list(_differences(session.config, before))
    if differences:
        raise ConfigError(
            "\n".join(
                f"{path} must be {_word(was)} as in the run that is resumed, got {_word(now)}. "
                "Set it back, or start a new run from that run's model."
                for path, was, now in differences
            )
        )
    now = session.config.run.num_steps
    if num_steps != now and session.config.trainer.lr_schedule != "constant":
        session.console.warn(
            f"run.num_steps is {now} and was {num_steps}: the {session.config.trainer.lr_schedule} schedule ends later or "
            "earlier than the steps made so far were told."
        )


def _differences(config: TrainConfig, before: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    now = json.loads(json.dumps(_decisive(config)))  # tuples as the lists that the file has
    for path in dict.fromkeys([*before, *now]):
        if before.get(path) != now.get(path):
            yield path, before.get(path), now.get(path)


def _decisive(config: TrainConfig) -> dict[str, Any]:
    """The options that the next steps depend on."""
    return {
        path: value
        for path, value in values(config).items()
        if not path.startswith(_MAY_CHANGE) and path not in _MAY_CHANGE_ITSELF
    }


def _word(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
