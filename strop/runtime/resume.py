"""What a session writes into a checkpoint and takes back from it."""

from __future__ import annotations

from strop.observe.metrics_file import drop_metrics_after, read_metrics
from strop.runtime.checkpoints import newest_checkpoint, write_checkpoint
from strop.runtime.session import Session


def save_checkpoint(session: Session) -> None:
    """All that the next step needs; random numbers follow from the seed and the step."""
    write_checkpoint(
        session.folder.checkpoints,
        session.step,
        save=session.trainer.save,
        state={"cursor": session.cursor_state, "objective": session.objective.state()},
        keep=session.config.run.keep_checkpoints,
    )


def restore(session: Session) -> None:
    """Go back to the newest complete checkpoint of the run folder.

    Raises:
        UserError: there is none, or it belongs to another model or other data.
    """
    path, state = newest_checkpoint(session.folder.checkpoints, warn=session.console.warn)
    session.trainer.load(path)
    session.engine.policy_version = session.trainer.num_steps
    session.cursor.load_state(state["cursor"])
    session.objective.load_state(state["objective"])
    session.cursor_state, session.step = state["cursor"], state["step"]
    drop_metrics_after(session.folder.metrics, session.step)
    session.history = read_metrics(session.folder.metrics)
    session.console.note(f"resumed from {path} after step {session.step}")
