"""The loop: sample, score, weigh, learn."""

from __future__ import annotations

from collections.abc import Sequence

from strop.observe.metrics_file import append_metrics
from strop.observe.rollout_file import write_rollouts
from strop.runtime.collect import collect
from strop.runtime.evaluation import answer_all
from strop.runtime.learning import learn, weigh
from strop.runtime.resume import save_checkpoint
from strop.runtime.session import Session
from strop.types import Rollout, StepMetrics, merge_metrics


async def train_steps(session: Session) -> None:
    """Make the steps that are left. A cancelled run stops between two steps, with everything of the last one written."""
    run = session.config.run
    if session.step == 0:
        await evaluate_now(session)
        session.console.phase_seconds.clear()
    while session.step < run.num_steps:
        rollouts, metrics = await collect(session)
        metrics = merge_metrics([metrics, *learn(session, weigh(session, rollouts))])
        metrics |= session.objective.adapt(metrics)
        if session.teachers is not None:
            metrics |= session.teachers.take_metrics()
        await session.engine.update_weights(session.trainer.weights(), session.trainer.num_steps)
        session.step += 1
        if _is_due(session.step, session.config.algorithm.kl.refresh_steps) and session.objective.uses_reference:
            session.trainer.refresh_reference()
        session.cursor_state = session.cursor.state()
        try:
            if session.step == run.num_steps or _is_due(session.step, session.config.eval.every_steps):
                await evaluate_now(session)
        finally:  # the step is made, whatever becomes of its evaluation
            record(session, rollouts, metrics)
        if _is_due(session.step, run.checkpoint_every_steps):
            save_checkpoint(session)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def record(session: Session, rollouts: Sequence[Rollout], metrics: StepMetrics) -> None:
    """One line of numbers for the step, on the console and in the run folder."""
    seconds = session.console.phase_seconds
    measured = {name: metric.value for name, metric in sorted(metrics.items()) if metric.count}
    flat = {"step": session.step, **measured}
    flat |= {f"seconds/{name}": value for name, value in seconds.items()}
    num_tokens = sum(r.num_response_tokens for r in rollouts)
    flat["tokens_per_second"] = num_tokens / max(
        sum(seconds.get(name, 0.0) for name in ("sample", "score", "logprobs", "teacher", "train")), 1e-9
    )
    if session.evaluations and session.evaluations[-1].step == session.step:
        flat |= session.evaluations[-1].metrics()
    session.history.append(flat)
    append_metrics(session.folder.metrics, flat)
    if session.config.run.save_rollouts:
        write_rollouts(session.folder.rollouts / f"step_{session.step:06d}.jsonl", rollouts)
    session.console.step(session.step, session.config.run.num_steps, flat)


async def evaluate_now(session: Session) -> None:
    """Evaluate the policy as it is, if there is anything to evaluate on."""
    if not session.eval_prompts:
        return
    config = session.config
    found = await answer_all(
        session.engine,
        session.eval_prompts,
        session.scorer,
        config.eval,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=config.rollout.stop_token_ids,
        seed=config.seed,
        step=session.step,
        decode=session.decode,
        console=session.console,
    )
    session.evaluations.append(found)
    if config.run.save_rollouts:
        write_rollouts(session.folder.rollouts / f"eval_{session.step:06d}.jsonl", found.rollouts)
    numbers = "  ".join(f"{name} reward {s.reward:.3f} +- {s.margin:.3f}" for name, s in found.scores.items())
    session.console.note(f"eval after step {session.step}: {numbers}")
