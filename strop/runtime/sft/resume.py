"""What a run of `strop sft` writes into a checkpoint and takes back from it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from strop.config.resuming import is_allowed
from strop.observe.metrics_file import drop_metrics_after, read_metrics
from strop.runtime.best import kept_step
from strop.runtime.checkpoints import find_checkpoint, write_checkpoint
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
from strop.runtime.random_states import random_states, restore_random_states, write_random_states
from strop.runtime.resume import check_base, kept_checkpoints
from strop.runtime.sft.session import SFTSession
from strop.runtime.sft.validation import Best
from strop.types import DataError, GuardError


def save_sft_checkpoint(session: SFTSession) -> None:
    """Begin to write the checkpoint of the step that is done."""
    write = ready_sft_checkpoint(session)
    session.writer.start(session.step, write)


def ready_sft_checkpoint(session: SFTSession) -> Callable[[], object]:
    """Copy all that the next step needs; what is returned writes the copy, whatever the run does meanwhile.

    Raises:
        GuardError: the weights are not finite. Nothing is written.
        UserError: the checkpoint before it could not be written.
    """
    with session.console.phase("checkpoint", 0):
        session.writer.wait()  # so that there is one copy at a time
        if not has_finite_weights(session.loaded.model):
            raise GuardError(f"the weights are not finite after step {session.step}; no checkpoint was written.")
        trainer, random = session.trainer.snapshot(), random_states()
        state = copy.deepcopy(_state(session))

    def save(folder: Path) -> None:
        trainer(folder)
        write_random_states(folder, random)

    keep = kept_checkpoints(session.config.run, state["best_step"], went_back=session.went_back)
    return partial(write_checkpoint, session.folder.checkpoints, session.step, save=save, state=state, keep=keep)


def _state(session: SFTSession) -> dict[str, Any]:
    return {
        "cursor": session.cursor_state,
        "demonstrations": session.fingerprint,
        "validation": {"held_out": session.held_out_fingerprint, "best": _plain(session.best)},
        "base": session.trainer.base_fingerprint,
        "num_steps": session.num_steps,
        "best_step": session.best.step if session.best.step >= 0 else None,
        "config": decisive(session.config),
        "versions": versions(),
    }


def restore_sft(session: SFTSession, which: str, allowed: frozenset[str]) -> None:
    """Go back to a checkpoint of the run folder.

    Args:
        session: freshly opened.
        which: the "newest" that is whole, the "best", or one by its name.
        allowed: options and tables that may differ from the run that wrote it.

    Raises:
        UserError: there is none, or it belongs to another config, another model or other data.
    """
    path, state = find_checkpoint(session.folder.checkpoints, which, warn=session.console.warn)
    if "demonstrations" not in state:
        raise DataError(f"{path} is of strop train. strop train CONFIG --resume goes on from it.")
    changes = allowed_differences(session.config, state["config"], allowed)
    changes += _other_data(session, state["demonstrations"], path, allowed)
    check_base(session.trainer, state.get("base"), path)
    warn_of_versions(state.get("versions", {}), session.console)
    session.trainer.load(path)
    restarts_data = any(change.restarts_data for change in changes)
    if restarts_data:
        session.console.warn("the data begin anew, with the first row of their first pass.")
    session.set_place(state["step"], session.cursor.state() if restarts_data else state["cursor"])
    restore_random_states(path)
    warn_of_schedule(
        session.config, num_steps=session.num_steps, num_steps_then=state["num_steps"], console=session.console
    )
    session.writer.saved_step = session.step
    session.went_back = which != "newest"
    tell_of_changes(session.folder.changes, session.step, changes, session.console)
    _restore_best(session, state["validation"])
    drop_metrics_after(session.folder.metrics, session.step)
    session.history = read_metrics(session.folder.metrics)
    made = sum(row["step"] > 0 for row in session.history)
    if made != session.step:
        session.console.warn(f"metrics.jsonl has lines of {made} of the {session.step} steps made.")
    session.console.note(f"resumed from {path} after step {session.step}")


def _other_data(session: SFTSession, before: str, path: Path, allowed: frozenset[str]) -> list[Change]:
    """Refuse other demonstrations than those that the run began with, unless they were asked for."""
    if before == session.fingerprint:
        return []
    if not is_allowed("data", allowed):
        raise DataError(
            f"data: the demonstrations are not those that {path} was trained on. "
            "Give it the file, columns and tokenizer that the run began with, go on with the new ones from their first row "
            "with --allow-change data, or start a new run from its model."
        )
    return [Change("data", before[:12], session.fingerprint[:12])]


def _restore_best(session: SFTSession, state: dict[str, Any]) -> None:
    best = state["best"]
    if not session.held_out:  # what was the best until now is carried on, with what it was the best of
        session.held_out_fingerprint = state["held_out"]
    if state["held_out"] != session.held_out_fingerprint:
        if best["step"] >= 0:
            session.console.warn("validation.data is not what it was: which model was best until now is forgotten.")
        return
    session.best = Best(best["step"], math.inf if best["loss"] is None else best["loss"], best["num_since"])
    kept = kept_step(session.folder.best)
    if kept is not None and kept > session.step:
        later = (
            "it is replaced as these steps are made again" if session.held_out else "it stays, without validation.data"
        )
        session.console.warn(f"best/ is of a later step than the checkpoint; {later}.")


def _plain(best: Best) -> dict[str, Any]:
    """As JSON, which has no word for infinity, can hold it."""
    return {**asdict(best), "loss": best.loss if math.isfinite(best.loss) else None}
