"""What a session writes into a checkpoint and takes back from it."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from strop.config import RunOptions
from strop.config.resuming import is_allowed
from strop.observe.metrics_file import drop_metrics_after, read_metrics
from strop.rewards import scorer_source
from strop.rollout import filter_source
from strop.runtime.best import restore_best
from strop.runtime.checkpoints import Keep, find_checkpoint, has_checkpoints, write_checkpoint
from strop.runtime.differences import (
    Change,
    allowed_differences,
    decisive,
    tell_of_changes,
    versions,
    warn_of_schedule,
    warn_of_versions,
)
from strop.runtime.models import has_finite_weights
from strop.runtime.random_states import restore_random_states, write_random_states
from strop.runtime.run_folder import RunFolder
from strop.runtime.session import Collected, Session
from strop.runtime.trainer_kinds import PolicyTrainer
from strop.runtime.waiting import (
    metrics_as_json,
    metrics_from_json,
    read_ahead,
    read_waiting,
    write_ahead,
    write_waiting,
)
from strop.trainers import CRITIC_FILE, REFERENCE_FILE
from strop.types import ConfigError, DataError, Group, GuardError, ModelError, UserError


def checkpoint_to_resume(folder: RunFolder, word: str | None, *, overwrite: bool) -> str | None:
    """What to go on from, with "auto" decided: the newest checkpoint if the folder has one, else nothing. Then the folder is
    to be cleared: it holds what may be replaced, or a run that ended before its first checkpoint was written.

    Raises:
        UserError: the folder holds a run that wrote no checkpoint, and nothing says that it may be replaced.
    """
    if word != "auto":
        return word
    if has_checkpoints(folder.checkpoints):
        return "newest"
    if folder.holds_run() and not overwrite and not _has_only_begun(folder):
        raise UserError(
            f"run.folder = {str(folder.path)!r} holds a run without a checkpoint, from which --resume auto cannot go on. "
            "Replace it with --run.overwrite, or name another folder. Its successor can be resumed with "
            "run.checkpoint_every_steps above 0."
        )
    return None


def _has_only_begun(folder: RunFolder) -> bool:
    """Is there a run of this folder that ended, however it did, before one of its checkpoints could be complete? Each of them
    waits for the one before it. False for anything else, such as a folder of one's own files."""
    if folder.holds_model():
        return False
    try:
        options = tomllib.loads(folder.config.read_text(encoding="utf-8"))["run"]
        written_for, every = Path(options["folder"]).resolve(), int(options["checkpoint_every_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if written_for != folder.path.resolve():
        return False
    return max((row["step"] for row in read_metrics(folder.metrics)), default=0) < 2 * every


def save_checkpoint(session: Session) -> None:
    """Begin to write the checkpoint of the step that is done."""
    write = ready_checkpoint(session)
    session.writer.start(session.step, write)


def ready_checkpoint(session: Session) -> Callable[[], object]:
    """Copy all that the next step needs; what is returned writes the copy, whatever the run does meanwhile.

    Raises:
        GuardError: the weights are not finite. Nothing is written.
        UserError: the checkpoint before it could not be written.
    """
    with session.console.phase("checkpoint", 0):
        session.writer.wait()  # so that there is one copy at a time
        if not has_finite_weights(session.loaded.model) or not _has_finite_critic(session):
            raise GuardError(f"the weights are not finite after step {session.step}; no checkpoint was written.")
        trainer = session.trainer.snapshot()
        critic = None if session.critic is None else session.critic.snapshot()
        state, place = copy.deepcopy(_state(session)), session.place

    def save(folder: Path) -> None:
        trainer(folder)
        write_waiting(folder, place.waiting)
        write_ahead(folder, place.ahead)
        write_random_states(folder, place.random)
        if critic is not None:
            critic(folder)

    keep = kept_checkpoints(session.config.run, state["best_step"], went_back=session.went_back)
    return partial(write_checkpoint, session.folder.checkpoints, session.step, save=save, state=state, keep=keep)


def _state(session: Session) -> dict[str, Any]:
    return {
        "cursor": session.place.cursor,
        "num_prompts_sampled": session.place.num_prompts_sampled,
        "owed": session.place.owed,
        "counts": metrics_as_json(session.place.counts),
        "objective": session.objective.state(),
        "guards": session.guards.state(),
        "prompts": session.prompts_fingerprint,
        "scorer": scorer_source(session.config.reward),
        "filters": filter_source(session.config.filter),
        "teachers": None if session.teachers is None else session.teachers.fingerprints,
        "base": session.trainer.base_fingerprint,
        "num_steps": session.config.run.num_steps,
        "best": None if session.best is None else asdict(session.best),
        "best_step": None if session.best is None else session.best.step,
        "config": decisive(session.config),
        "versions": versions(),
    }


def kept_checkpoints(options: RunOptions, best_step: int | None, *, went_back: bool) -> Keep:
    """What `[run]` says of the checkpoints that stay."""
    best = best_step if options.keep_best_checkpoint else None
    return Keep(options.keep_checkpoints, options.keep_every_steps, best, drops_later=went_back)


def _has_finite_critic(session: Session) -> bool:
    return session.critic is None or has_finite_weights(session.critic.model)


def restore(session: Session, which: str, allowed: frozenset[str]) -> None:
    """Go back to a checkpoint of the run folder.

    Args:
        session: freshly opened.
        which: the "newest" that is whole, the "best", or one by its name.
        allowed: options and tables that may differ from the run that wrote it.

    Raises:
        UserError: there is none, or it belongs to another config, another model or other data.
    """
    path, state = find_checkpoint(session.folder.checkpoints, which, warn=session.console.warn)
    if "prompts" not in state:
        raise DataError(f"{path} is of strop sft. strop sft CONFIG --resume goes on from it.")
    config, console = session.config, session.console
    changes = allowed_differences(config, state["config"], allowed)
    changes += _other_data(session, state["prompts"], path, allowed)
    changes += _other_teachers(session, state.get("teachers"), path, allowed)
    _check_has_parts(session, path)
    warn_of_schedule(config, num_steps=config.run.num_steps, num_steps_then=state["num_steps"], console=console)
    warn_of_versions(state.get("versions", {}), console)
    _warn_of_sources(session, state)
    _load(session, path, state, changes)
    tell_of_changes(session.folder.changes, session.step, changes, console)
    drop_metrics_after(session.folder.metrics, session.step)
    session.history = read_metrics(session.folder.metrics)
    restore_best(session, state.get("best"))  # absent in checkpoints of before there was one
    num_lines = sum(row["step"] > 0 for row in session.history)
    if num_lines != session.step:
        console.warn(f"metrics.jsonl has lines of {num_lines} of the {session.step} steps made.")
    session.went_back = which != "newest"
    console.note(f"resumed from {path} after step {session.step}")


def _load(session: Session, path: Path, state: Mapping[str, Any], changes: list[Change]) -> None:
    """Everything but what is said and measured of the steps made."""
    restore_learners(session, path, state, changes)
    if "guards" in state:  # absent in checkpoints of before they remembered anything
        session.guards.load_state(state["guards"])
    session.num_prompts_sampled = state["num_prompts_sampled"]
    waiting, ahead = read_waiting(path, session.prompts), read_ahead(path, session.prompts)
    if not any(change.restarts_data for change in changes):
        session.cursor.load_state(state["cursor"])
        owed = tuple((number, row) for number, row in state.get("owed", ()))  # absent in earlier versions
        if session.config.may_be_stale:
            session.waiting, session.ahead, session.owed = waiting, ahead, owed
        else:  # by options that were changed, only what is of the newest weights is learned from
            session.owed = (*_numbered_rows(waiting, ahead), *owed)
        session.counts = metrics_from_json(state.get("counts", {}))
    else:
        dropped = f" {len(waiting)} groups that waited for the next step are dropped." if waiting else ""
        dropped += f" {len(ahead)} batches that were sampled ahead are dropped." if ahead else ""
        session.console.warn(f"the data begin anew, with the first row of their first pass.{dropped}")
    if not restore_random_states(path):
        session.console.warn(f"{path} has no random states: what scorers draw at random begins anew.")
    session.mark_place()
    session.step = state["step"]
    session.writer.saved_step = session.step


def _numbered_rows(waiting: Sequence[Group], ahead: Sequence[Collected]) -> list[tuple[int, int]]:
    """Number and row of the prompts of groups and batches, in the order of the numbers."""
    rollouts = [r for group in waiting for r in group.rollouts] + [r for batch in ahead for r in batch.rollouts]
    return sorted({(rollout.group_id, rollout.prompt.row) for rollout in rollouts})


def _still_valid(coefficients: Mapping[str, float], changes: Sequence[Change]) -> dict[str, float]:
    """Coefficients that adapt, without those whose options were changed: these begin with the new value."""
    changed = [name for name in ("kl", "entropy") if any(c.option.startswith(f"algorithm.{name}") for c in changes)]
    return {name: value for name, value in coefficients.items() if name.removesuffix("_coef") not in changed}


def _check_has_parts(session: Session, path: Path) -> None:
    """Raises ConfigError where a change asks for a model that the checkpoint lacks."""
    needed = (
        (REFERENCE_FILE, "reference", session.trainer.saves_reference),
        (CRITIC_FILE, "critic", session.critic is not None),
    )
    for file, what, is_needed in needed:
        if is_needed and not (path / file).exists():
            raise ConfigError(
                f"{path} holds no {what}, which this config needs: the run did without one. A {what} cannot begin in the "
                "middle of a run, even if the change is confirmed. Start a new run from this run's model."
            )


def _warn_of_sources(session: Session, state: Mapping[str, Any]) -> None:
    if state["scorer"] != scorer_source(session.config.reward):
        session.console.warn(
            "the file of reward.function has changed since the checkpoint was written: scores may differ."
        )
    if state["filters"] != filter_source(session.config.filter):
        session.console.warn(
            "a file of filter.group or filter.rollout has changed since the checkpoint was written: other groups may stay."
        )


def restore_learners(session: Session, path: Path, state: Mapping[str, Any], changes: Sequence[Change] = ()) -> None:
    """All that learns as a checkpoint has it."""
    check_base(session.trainer, state.get("base"), path)
    session.trainer.load(path)
    if session.critic is not None:
        with _as_option(session, path):
            session.critic.load(path)
    session.objective.load_state(_still_valid(state["objective"], changes))
    if session.engine is not None:
        session.engine.policy_version = session.trainer.num_steps


@contextmanager
def _as_option(session: Session, path: Path) -> Iterator[None]:
    """A critic of another shape comes from what the options name, and not from the checkpoint."""
    try:
        yield
    except UserError as error:
        option, critic = (
            ("critic.path", session.config.critic.path) if session.config.critic.path else ("model.path", "")
        )
        got = f", got {critic!r}" if critic else ""
        raise ModelError(
            f"{option} must give a critic of the shape that {path} holds{got}. Set it back to what the run began with, or "
            f"start a new run from this run's model. ({error})"
        ) from error


def _other_data(session: Session, before: str, path: Path, allowed: frozenset[str]) -> list[Change]:
    """Refuse other prompts than those that the run began with, unless they were asked for."""
    now = session.prompts_fingerprint
    if before == now:
        return []
    if not is_allowed("data", allowed):
        raise DataError(
            f"data: the prompts are not those that {path} was trained on. "
            "Give it the file, columns and tokenizer that the run began with, go on with the new prompts from their first row "
            "with --allow-change data, or start a new run from its model."
        )
    return [Change("data", before[:12], now[:12])]


def _other_teachers(
    session: Session, before: Mapping[str, str] | None, path: Path, allowed: frozenset[str]
) -> list[Change]:
    """Refuse other teachers than those that the run began with, wherever they lie now, unless they were asked for."""
    now = None if session.teachers is None else session.teachers.fingerprints
    if before == now:
        return []
    names = sorted({*(before or {}), *(now or {})})
    source = next(name for name in names if (before or {}).get(name) != (now or {}).get(name))
    option = f"distillation.teacher{f's.{source}' if source else ''}"
    if is_allowed(option, allowed):
        return [Change(option, before, now)]
    raise ModelError(
        f"{option} must be the teacher that {path} was trained with: weights and "
        "type of weights, or the name that its server gives it. Set it back, confirm another one with "
        f"--allow-change {option.partition('.teachers.')[0]}{'.teachers' if source else ''}, or start a new run from this "
        "run's model."
    )


def check_base(trainer: PolicyTrainer, before: str | None, path: Path) -> None:
    """Adapters go on from the model that they were made for, wherever it lies now; raises ModelError for another one."""
    if before != trainer.base_fingerprint:
        raise ModelError(
            f"model.path must be the model whose adapters {path} holds; the weights differ. Set it back, or start a new run."
        )
