"""What a run records for those who want to train on its rollouts again, or to redo one of its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from strop.observe.rollout_file import write_rollouts
from strop.runtime.from_rollouts import write_about
from strop.runtime.session import Session
from strop.types import Rollout

_WEIGHTS = "weights.jsonl"  # in rollouts/: a checksum of the weights after each step


def is_replayable(session: Session) -> bool:
    """True if the run records all that redoing its steps takes."""
    return session.config.run.save_rollouts and session.config.run.rollout_form == "whole"


def start_recording(session: Session) -> None:
    """Before the first step: how rollouts are sampled, and which weights the run starts from."""
    folder = session.folder.rollouts
    if not is_replayable(session):
        folder.mkdir(exist_ok=True)
        return
    write_about(folder, session.config)
    if session.step == 0:
        (folder / _WEIGHTS).write_text("", encoding="utf-8")
        record_weights(session)


def record_step(session: Session, rollouts: Sequence[Rollout]) -> None:
    """A step is done."""
    if session.config.run.save_rollouts:
        form = session.config.run.rollout_form
        write_rollouts(session.folder.rollouts / f"step_{session.step:06d}.jsonl", rollouts, form=form)
    if is_replayable(session):
        record_weights(session)


def record_weights(session: Session) -> None:
    """The weights as they are now: those after `session.step` steps."""
    line = {"step": session.step, **digests(session)}
    with (session.folder.rollouts / _WEIGHTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def digests(session: Session) -> dict[str, str]:
    """Checksums of all weights that learn, by the name of the model."""
    found = {"policy": session.trainer.digest()}
    return found if session.critic is None else found | {"critic": session.critic.digest()}


def recorded_weights(rollouts: Path) -> dict[int, dict[str, str]]:
    """The checksums after each step; of a step that was made twice, after a crash, the later ones."""
    path = rollouts / _WEIGHTS
    found: dict[int, dict[str, str]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = dict(json.loads(line))
            found[int(row.pop("step"))] = row
        except (ValueError, TypeError, KeyError, RecursionError):  # cut short by a crash
            continue
    return found
