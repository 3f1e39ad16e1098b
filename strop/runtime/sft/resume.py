"""What a run of `strop sft` writes into a checkpoint and takes back from it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from strop.observe.metrics_file import drop_metrics_after, read_metrics
from strop.runtime.checkpoints import newest_checkpoint, write_checkpoint
from strop.runtime.models import has_finite_weights
from strop.runtime.resume import check_config, decisive, warn_of_schedule
from strop.runtime.sft.session import SFTSession
from strop.runtime.sft.validation import Best
from strop.types import DataError, GuardError


def save_sft_checkpoint(session: SFTSession) -> None:
    """All that the next step needs.

    Raises:
        GuardError: the weights are not finite. Nothing is written.
    """
    if not has_finite_weights(session.loaded.model):
        raise GuardError(f"the weights are not finite after step {session.step}; no checkpoint was written.")
    state = {
        "cursor": session.cursor_state,
        "demonstrations": session.fingerprint,
        "validation": {"held_out": session.held_out_fingerprint, "best": _plain(session.best)},
        "num_steps": session.num_steps,
        "config": decisive(session.config),
    }
    keep = session.config.run.keep_checkpoints
    write_checkpoint(session.folder.checkpoints, session.step, save=session.trainer.save, state=state, keep=keep)
    session.saved_step = session.step


def restore_sft(session: SFTSession) -> None:
    """Go back to the newest complete checkpoint of the run folder.

    Raises:
        UserError: there is none, or it belongs to another config, another model or other data.
    """
    path, state = newest_checkpoint(session.folder.checkpoints, warn=session.console.warn)
    if "demonstrations" not in state:
        raise DataError(f"{path} is of strop train. strop train CONFIG --resume goes on from it.")
    check_config(session.config, state["config"])
    if state["demonstrations"] != session.fingerprint:
        raise DataError(
            f"data: the demonstrations are not those that {path} was trained on. "
            "Give it the file, columns and tokenizer that the run began with, or start a new run from its model."
        )
    session.trainer.load(path)
    session.set_place(state["step"], state["cursor"])
    warn_of_schedule(
        session.config, num_steps=session.num_steps, num_steps_then=state["num_steps"], console=session.console
    )
    session.saved_step = session.step
    _restore_best(session, state["validation"])
    drop_metrics_after(session.folder.metrics, session.step)
    session.history = read_metrics(session.folder.metrics)
    made = sum(row["step"] > 0 for row in session.history)
    if made != session.step:
        session.console.warn(f"metrics.jsonl has lines of {made} of the {session.step} steps made.")
    session.console.note(f"resumed from {path} after step {session.step}")


def _restore_best(session: SFTSession, state: dict[str, Any]) -> None:
    best = state["best"]
    if not session.held_out:  # what was the best until now is carried on, with what it was the best of
        session.held_out_fingerprint = state["held_out"]
    if state["held_out"] != session.held_out_fingerprint:
        if best["step"] >= 0:
            session.console.warn("validation.data is not what it was: which model was best until now is forgotten.")
        return
    session.best = Best(best["step"], math.inf if best["loss"] is None else best["loss"], best["num_since"])
    kept = session.folder.best / "best.json"
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8"))["step"] > session.step:
        later = (
            "it is replaced as these steps are made again" if session.held_out else "it stays, without validation.data"
        )
        session.console.warn(f"best/ is of a later step than the checkpoint; {later}.")


def _plain(best: Best) -> dict[str, Any]:
    """As JSON, which has no word for infinity, can hold it."""
    return {**asdict(best), "loss": best.loss if math.isfinite(best.loss) else None}
