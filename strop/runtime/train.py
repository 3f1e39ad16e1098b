"""`strop train` as a function: open, loop, and whatever happens leave a model and a report behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from strop import interrupts
from strop.algorithms import objective_formula
from strop.config import TrainConfig
from strop.config.resuming import allowed_changes, resume_word
from strop.config.tree import walk
from strop.observe.console import Console, QuietConsole
from strop.observe.report import write_report
from strop.runtime.best import best_line
from strop.runtime.critics import save_critic
from strop.runtime.evaluation import Evaluation
from strop.runtime.loop import train_steps
from strop.runtime.models import has_finite_weights
from strop.runtime.random_states import seeded
from strop.runtime.rank import serve_if_asked
from strop.runtime.recording import start_recording
from strop.runtime.resume import checkpoint_to_resume, restore, save_checkpoint
from strop.runtime.run_folder import RunFolder
from strop.runtime.session import Session, open_session, write_start
from strop.types import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class TrainResult:
    """What a run left behind."""

    folder: Path
    model: Path  # a Hugging Face folder
    steps: list[dict[str, float]]  # the lines of metrics.jsonl
    evaluations: list[Evaluation]
    interrupted: bool  # stopped by Ctrl-C or SIGTERM, between two steps


def train(
    config: TrainConfig,
    *,
    resume: bool | str = False,
    allow_change: Sequence[str] = (),
    console: Console | None = None,
) -> TrainResult:
    """Improve a model by reinforcement learning as the config says.

    Args:
        config: from `strop.load_config`.
        resume: go on from the newest complete checkpoint in the run folder (True), from the "best", or from one by its name;
            "auto" goes on from the newest if there is one, and begins the run if the folder holds none.
        allow_change: options and tables that may differ from the run that is resumed; `data` begins the data anew.
        console: where progress goes; None means nowhere.

    Returns:
        TrainResult. After Ctrl-C too: the model is written as it was after the last whole step.

    Raises:
        UserError: something a user can mend; nothing was trained.
        GuardError: a guard stopped a step before the optimizer; the model from before it is in the run folder.
    """
    serve_if_asked(config.trainer)
    with opened(config, console or QuietConsole(), resume=resume, allow_change=allow_change) as session:
        interrupted = run(session)
    folder = session.folder
    return TrainResult(folder.path, folder.model, session.history, session.evaluations, interrupted)


@contextmanager
def opened(
    config: TrainConfig, console: Console, *, resume: bool | str = False, allow_change: Sequence[str] = ()
) -> Iterator[Session]:
    """A session in a run folder that is its own for as long as this lasts, ready for `run`.

    Raises:
        UserError: something a user can mend.
    """
    word = resume_word(resume)
    allowed = allowed_changes(TrainConfig, allow_change, resumes=word is not None)
    for _, table in walk(config):
        for warning in table.warnings():
            console.warn(warning)
    folder, overwrite = RunFolder(config.folder), config.run.overwrite
    with folder.held(overwrite=overwrite, resume=word is not None), seeded(config.seed):
        which = checkpoint_to_resume(folder, word, overwrite=overwrite)
        session = open_session(config, console, folder)
        with closing(session):
            if which is not None:
                restore(session, which, allowed)
            interrupts.check()
            if session.step >= config.run.num_steps:
                console.warn(
                    f"nothing is left to do: step {session.step} of run.num_steps = {config.run.num_steps} is made."
                )
            if which is None and (overwrite or word is not None):
                folder.clear()
            yield session


def run(session: Session) -> bool:
    """Make the steps that are left, and leave model and report behind however that ends. True if interrupted."""
    return run_async(_run(session))


async def _run(session: Session) -> bool:
    """The loop, with the model and the report written however it ends. True if somebody asked it to stop."""
    has_begun = True  # False: something a user can mend ended the first step, and of such a run nothing stays
    with interrupts.cancelling() as stop:
        try:
            formula = objective_formula(session.config)
            write_start(session, formula)
            start_recording(session)
            session.console.note(formula)
            session.console.note(f"first prompt as the model reads it: {session.prompts[0].text!r}")
            await train_steps(session)
        except asyncio.CancelledError:
            stop.is_set = True  # also where a notebook's stop button cancelled it
            session.console.warn(f"interrupted after step {session.step}; saving.")
        except UserError:
            has_begun = session.step > 0 or session.writer.saved_step >= 0
            raise
        finally:
            if session.engine is not None:
                await session.engine.close()
            if has_begun:
                _finish(session)
            else:
                session.folder.clear()
        return stop.is_set


def _finish(session: Session) -> None:
    """Model, checkpoint and report, each whatever became of the one before it."""
    with ExitStack() as everything:  # the last one first
        everything.callback(session.writer.wait)
        everything.callback(_write_report, session)
        everything.callback(session.folder.drop_best_of_earlier_run)
        if session.trainer.is_torn or (session.critic is not None and session.critic.is_torn):
            session.console.warn(
                f"no model was written: a process was lost while weights were gathered after step {session.step}."
            )
            return
        if not has_finite_weights(session.loaded.model):
            session.console.warn(f"no model was written: the weights are not finite after step {session.step}.")
            return
        everything.callback(session.folder.write_critic, _saving_critic(session))
        everything.callback(session.folder.write_model, session.loaded.model, session.loaded.tokenizer)
        everything.callback(_save_if_due, session)
        session.writer.wait()


def _save_if_due(session: Session) -> None:
    due = session.config.run.checkpoint_every_steps and session.writer.saved_step != session.step
    if due and not session.is_within_step and session.trainer.ranks.is_whole:
        save_checkpoint(session)


def _saving_critic(session: Session) -> Callable[[Path], None] | None:
    critic = session.critic
    if critic is None:
        return None
    if not has_finite_weights(critic.model):
        session.console.warn(f"no critic was written: its weights are not finite after step {session.step}.")
        return None
    return lambda folder: save_critic(critic, session.loaded.tokenizer, folder)


def _write_report(session: Session) -> None:
    folder = session.folder
    write_report(
        folder.report,
        title=folder.path.name,
        metrics=session.history,
        objective=objective_formula(session.config),
        rollouts=folder.rollouts,
    )
    model = f"model: {folder.model}    " if folder.model.exists() else ""
    best = best_line(session)
    if best:
        session.console.note(best)
    session.console.note(f"{model}report: {folder.report}")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also from inside a notebook, whose own event loop is running already."""
    try:
        asyncio.get_running_loop()
        is_in_loop = True
    except RuntimeError:
        is_in_loop = False
    if not is_in_loop:  # outside of the except block: errors of the work would be said to come from its RuntimeError
        return asyncio.run(work)
    outcome: list[T] = []
    errors: list[BaseException] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work

    def in_thread() -> None:
        try:
            outcome.append(asyncio.run(watched()))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:  # the notebook's stop button: end the run as Ctrl-C would
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
    if errors:
        raise errors[0]
    return outcome[0]
