"""What becomes of a run whose update a guard has refused: it stops, skips the step, or goes back to a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from strop.observe.rollout_file import write_rollouts
from strop.runtime.checkpoints import checkpoint_until
from strop.runtime.from_rollouts import write_about
from strop.runtime.resume import restore_learners, save_checkpoint
from strop.runtime.session import Session
from strop.types import GuardError, Rollout, UserError


def prepare_rollbacks(session: Session) -> None:
    """Where a guard may take the run back there is a checkpoint from its start on."""
    if "rollback" in session.config.guards.actions.values() and session.writer.saved_step < 0:
        save_checkpoint(session)


def respond(session: Session, error: GuardError, rollouts: Sequence[Rollout] | None, *, writes: bool = True) -> None:
    """Do what `[guards]` asks for. Weights, moments and coefficients are then those of before the step, or of the newest
    checkpoint.

    Args:
        session: of the run, before the step is counted.
        error: of the guard.
        rollouts: of the step; None where the model could not even sample them, which can not be skipped.
        writes: False to leave the run folder as it is.

    Raises:
        GuardError: the run is to stop.
    """
    session.guards.step_refused()
    if writes and rollouts is not None:
        _write_refused(session, error, rollouts)
    action = "stop" if error.guard is None else session.config.guards.actions[error.guard]
    if action == "stop" or (action == "skip" and rollouts is None):
        raise error
    if action == "skip":
        _skip(session, error)
    else:
        _roll_back(session, error)


def _write_refused(session: Session, error: GuardError, rollouts: Sequence[Rollout]) -> None:
    """The batch as a file that can be trained on; in the lines of the sequences that a guard names, its message."""
    write_about(session.folder.guards, session.config)
    path = session.folder.guards / f"step_{session.step + 1:06d}.jsonl"
    write_rollouts(path, rollouts, blamed=dict.fromkeys(error.blamed, str(error)))
    session.console.note(f"the rollouts of the refused step are in {path}")


def _skip(session: Session, error: GuardError) -> None:
    guards, limit = session.guards, session.config.guards.window_steps
    guards.num_skipped += 1
    guards.num_skipped_in_a_row += 1
    session.console.warn(f"step {session.step + 1} is skipped: {error}")
    if guards.num_skipped_in_a_row >= limit:
        raise GuardError(
            f"{limit} steps in a row were skipped (guards.window_steps): nothing is learned any more. {error}"
        )


def _roll_back(session: Session, error: GuardError) -> None:
    guards, limit = session.guards, session.config.guards.max_rollbacks
    if guards.num_rollbacks >= limit:
        raise GuardError(f"{error} The run has gone back to a checkpoint guards.max_rollbacks = {limit} times already.")
    session.writer.wait()  # the newest may be on its way to the disk
    checkpoint = checkpoint_until(session.folder.checkpoints, warn=session.console.warn, until=session.step)
    if checkpoint is None:
        raise UserError(
            f"{session.folder.checkpoints} must hold the checkpoint that step {session.step + 1} took the run back to: it is "
            "gone. Raise run.keep_checkpoints to keep more."
        )
    path, state = checkpoint
    restore_learners(session, path, state)
    guards.load_steps(state["guards"])
    guards.num_rollbacks += 1
    guards.num_skipped_in_a_row = 0
    guards.wants_checkpoint = True
    session.waiting, session.ahead, session.owed, session.counts = (), (), (), {}  # of the policy that was left
    session.is_within_step = False
    session.console.warn(f"step {session.step + 1} took the run back to {path}, and on with the next prompts: {error}")
