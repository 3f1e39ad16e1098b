"""`strop sft` as a function: open, loop, and whatever happens leave a model and a report behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from strop import interrupts
from strop.algorithms import likelihood_formula
from strop.config import SFTConfig, to_toml
from strop.config.resuming import allowed_changes, resume_word
from strop.config.tree import walk
from strop.observe.console import Console, QuietConsole
from strop.observe.report import write_report
from strop.runtime.best import kept_step
from strop.runtime.models import has_finite_weights
from strop.runtime.random_states import seeded
from strop.runtime.rank import serve_if_asked
from strop.runtime.resume import checkpoint_to_resume
from strop.runtime.run_folder import RunFolder
from strop.runtime.sft.resume import restore_sft, save_sft_checkpoint
from strop.runtime.sft.session import SFTSession, open_sft_session
from strop.runtime.sft.steps import imitate
from strop.runtime.sft.validation import Best, Validation
from strop.types import UserError


@dataclass(frozen=True)
class SFTResult:
    """What a run left behind."""

    folder: Path
    model: Path  # after the last step, a Hugging Face folder
    steps: list[dict[str, float]]  # the lines of metrics.jsonl
    interrupted: bool  # stopped by Ctrl-C or SIGTERM, between two steps
    validations: list[Validation]
    best: Best | None  # where something was validated; its model is in best/ of the folder
    left_out: dict[str, int]  # "data/num_dropped", "validation.data/num_skipped_lines", ...: as in metrics.jsonl


def sft(
    config: SFTConfig,
    *,
    resume: bool | str = False,
    allow_change: Sequence[str] = (),
    console: Console | None = None,
) -> SFTResult:
    """Fine-tune a model on demonstrations: each optimizer step on `data.batch_size` of them.

    Args:
        config: from `strop.load_config(..., command="sft")`.
        resume: go on from the newest complete checkpoint in the run folder (True), from the "best", or from one by its name;
            "auto" goes on from the newest if there is one, and begins the run if the folder holds none.
        allow_change: options and tables that may differ from the run that is resumed; `data` begins the data anew.
        console: where progress goes; None means nowhere.

    Raises:
        UserError: something a user can mend; nothing was trained.
        GuardError: a loss or gradient was not finite; the model from before it is in the run folder.
    """
    serve_if_asked(config.trainer)
    console, word = console or QuietConsole(), resume_word(resume)
    allowed = allowed_changes(SFTConfig, allow_change, resumes=word is not None)
    for _, table in walk(config):
        for warning in table.warnings():
            console.warn(warning)
    folder, overwrite = RunFolder(config.folder), config.run.overwrite
    with folder.held(overwrite=overwrite, resume=word is not None), seeded(config.seed), ExitStack() as processes:
        which = checkpoint_to_resume(folder, word, overwrite=overwrite)
        session = open_sft_session(config, console, folder, processes)
        if which is not None:
            restore_sft(session, which, allowed)
        interrupts.check()
        if session.step >= session.num_steps or session.has_lost_patience:
            console.warn(f"nothing is left to do: {_what_is_made(session)}.")
        if which is None and (overwrite or word is not None):
            folder.clear()
        interrupted = _run(session)
    best = session.best if session.best.step >= 0 else None
    return SFTResult(
        folder.path, folder.model, session.history, interrupted, session.validations, best, session.left_out
    )


def _what_is_made(session: SFTSession) -> str:
    run = session.config.run
    if session.step <= session.num_steps:
        return f"step {session.step} of {session.num_steps} is made"
    asked = f"run.num_epochs = {run.num_epochs}" if run.num_steps is None else f"run.num_steps = {run.num_steps}"
    return f"{session.step} steps are made, and {asked} asks for fewer. The model stays that of step {session.step}"


def _run(session: SFTSession) -> bool:
    """The loop, with the model and the report written however it ends. True if somebody asked it to stop."""
    folder, has_begun = session.folder, True
    with interrupts.stop_flag() as stop:
        try:
            folder.write_config(to_toml(session.config))
            folder.objective.write_text(likelihood_formula(session.config), encoding="utf-8")
            imitate(session, stop)
        except UserError:  # of a run whose first step it ended nothing stays
            has_begun = session.step > 0
            raise
        finally:
            if has_begun:
                _finish(session)
            else:
                folder.clear()
    return stop.is_set


def _finish(session: SFTSession) -> None:
    """Checkpoint, model and report, each whatever became of the one before it."""
    with ExitStack() as everything:  # the last one first
        everything.callback(session.writer.wait)
        everything.callback(_write_report, session)
        everything.callback(session.folder.drop_best_of_earlier_run)
        if session.trainer.is_torn:
            session.console.warn(
                f"no model was written: a process was lost while weights were gathered after step {session.step}."
            )
            return
        if not has_finite_weights(session.loaded.model):
            session.console.warn(f"no model was written: the weights are not finite after step {session.step}.")
            return
        everything.callback(session.folder.write_model, session.loaded.model, session.loaded.tokenizer)
        everything.callback(_save_if_due, session)
        session.writer.wait()


def _save_if_due(session: SFTSession) -> None:
    is_due = session.config.run.checkpoint_every_steps > 0 and session.writer.saved_step != session.step
    if is_due and not session.is_within_step and session.trainer.ranks.is_whole:
        save_sft_checkpoint(session)


def _write_report(session: SFTSession) -> None:
    folder = session.folder
    write_report(
        folder.report,
        title=folder.path.name,
        metrics=session.history,
        objective=likelihood_formula(session.config),
        rollouts=None,
    )
    parts = [f"model: {folder.model}"] if folder.model.exists() else []
    if kept_step(folder.best) is not None:
        best = json.loads((folder.best / "best.json").read_text(encoding="utf-8"))
        parts.append(f"best (after step {best['step']}, validation loss {best['validation_loss']:.4f}): {folder.best}")
    session.console.note("    ".join([*parts, f"report: {folder.report}"]))
