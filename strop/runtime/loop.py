"""The loop: sample, score, weigh, learn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from strop.observe.metrics_file import append_metrics
from strop.observe.rollout_file import write_rollouts
from strop.runtime.best import take_best
from strop.runtime.collectors import Collector, collecting
from strop.runtime.evaluation import answer_all
from strop.runtime.guards import prepare_rollbacks, respond
from strop.runtime.learning import Seen, learn, learns_alone, unseen, weigh
from strop.runtime.profiling import StepProfiler
from strop.runtime.recording import record_step
from strop.runtime.resume import ready_checkpoint, save_checkpoint
from strop.runtime.session import Session
from strop.types import GuardError, Rollout, StepMetrics, merge_metrics


async def train_steps(session: Session) -> None:
    """Make the steps that are left. A cancelled run stops between two steps, with everything of the last one written."""
    run = session.config.run
    if session.step == 0 and session.config.eval.at_start and not session.history:  # else it goes on from before step 1
        await evaluate_now(session)
        record_start(session)
        session.console.phase_seconds.clear()
    prepare_rollbacks(session)
    profiler = StepProfiler(session)
    async with collecting(session) as collector:
        while session.step < run.num_steps:
            with profiler.next_step():
                await _train_step(session, collector)


async def _train_step(session: Session, collector: Collector) -> None:
    """One step, and what is due after it. Where the model cannot sample any more, what the guards answer to that."""
    try:
        rollouts, metrics = await collector.take()
    except GuardError as error:
        respond(session, error, None)
        await collector.restart()
        collector.mark_place()
        _save_if_taken_back(session)
        return
    metrics = await collector.train(partial(make_step, session, rollouts, metrics))
    collector.mark_place()
    write_checkpoint = None
    try:
        is_eval_due = _is_eval_due(session)
        metrics |= await collector.share(holds=is_eval_due or _is_checkpoint_due(session))
        if is_eval_due:
            await evaluate_now(session)
        if session.guards.wants_checkpoint or is_eval_due or _is_checkpoint_due(session):
            collector.mark_place()  # again: scorers may have drawn from the random states, and batches may be ahead
        if _is_checkpoint_due(session):
            write_checkpoint = ready_checkpoint(session)
    finally:  # the step is made, whatever becomes of its evaluation and its checkpoint
        record(session, rollouts, metrics)
    _save_if_taken_back(session)
    if write_checkpoint is not None and session.writer.saved_step != session.step:
        session.writer.start(session.step, write_checkpoint)
    session.writer.check()


def _is_eval_due(session: Session) -> bool:
    return session.step == session.config.run.num_steps or _is_due(session.step, session.config.eval.every_steps)


def _is_checkpoint_due(session: Session) -> bool:
    is_best = session.best is not None and session.best.step == session.step
    return session.config.run.is_checkpoint_due(session.step, is_best=is_best)


def make_step(
    session: Session, rollouts: Sequence[Rollout], metrics: StepMetrics, *, seen: Seen = unseen, writes: bool = True
) -> StepMetrics:
    """Learn from the rollouts of the next step, as the guards let it; returns what is known of the step then.

    Args:
        session: ready for the step, and after it for the one after.
        rollouts: scored.
        metrics: what collecting them said.
        seen: sees each update before it is made.
        writes: False to leave the run folder as it is.

    Raises:
        GuardError: a guard stops the run.
    """
    try:
        metrics = merge_metrics([metrics, *learn(session, weigh(session, rollouts), seen)])
    except GuardError as error:
        respond(session, error, rollouts, writes=writes)
    else:
        session.guards.step_made()
        metrics |= session.objective.adapt(metrics, follows=not learns_alone(session))
    if session.teachers is not None:
        metrics |= session.teachers.take_metrics()
    session.step += 1
    if _is_due(session.step, session.config.algorithm.kl.refresh_steps) and session.objective.uses_reference:
        session.trainer.refresh_reference()
    return metrics


def _save_if_taken_back(session: Session) -> None:
    """After going back to a checkpoint the run has one of its own: going on from there, and redoing later steps, never
    needs to cross the refused step again."""
    if session.guards.wants_checkpoint:
        session.guards.wants_checkpoint = False
        save_checkpoint(session)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def record_start(session: Session) -> None:
    """The evaluation before the first step, if there is one, as the line of step 0."""
    if session.evaluations:
        flat = {"step": 0, **session.evaluations[-1].metrics()}
        session.history.append(flat)
        append_metrics(session.folder.metrics, flat)


def record(session: Session, rollouts: Sequence[Rollout], metrics: StepMetrics) -> None:
    """One line of numbers for the step, on the console and in the run folder."""
    seconds = session.console.phase_seconds
    measured = {name: metric.value for name, metric in sorted(metrics.items()) if metric.count}
    flat = {"step": session.step, **measured, **session.guards.counts()}
    flat |= {f"seconds/{name}": value for name, value in {"idle": 0.0, **seconds}.items()}
    num_tokens = sum(r.num_response_tokens for r in rollouts)
    flat["tokens_per_second"] = num_tokens / max(
        sum(seconds.get(name, 0.0) for name in ("sample", "score", "wait", "logprobs", "teacher", "train")), 1e-9
    )
    if session.evaluations and session.evaluations[-1].step == session.step:
        flat |= session.evaluations[-1].metrics()
    session.history.append(flat)
    append_metrics(session.folder.metrics, flat)
    record_step(session, rollouts)
    session.console.step(session.step, session.config.run.num_steps, flat)


async def evaluate_now(session: Session) -> None:
    """Evaluate the policy as it is, if there is anything to evaluate on."""
    if not session.held_out:
        return
    assert session.engine is not None
    found = await answer_all(
        session.engine,
        session.held_out,
        session.config,
        step=session.step,
        decode=session.decode,
        console=session.console,
    )
    session.evaluations.append(found)
    for name, answers in found.answers.items() if session.config.run.save_rollouts else ():
        ending = f"_{name}" if name else ""
        file = session.folder.rollouts / f"eval_{session.step:06d}{ending}.jsonl"
        write_rollouts(file, answers, form=session.config.run.rollout_form)
    session.console.note(f"eval after step {session.step}: {found.line()}")
    take_best(session)
