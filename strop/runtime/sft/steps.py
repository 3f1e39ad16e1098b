"""The loop of `strop sft`: learn a batch, validate when it is due, write it down."""

from __future__ import annotations

import json
from dataclasses import replace

from strop import interrupts, ops
from strop.algorithms import LikelihoodObjective
from strop.config import SFTConfig
from strop.data import Batch, demonstration_batch
from strop.observe.metrics_file import append_metrics
from strop.runtime.sft.resume import ready_sft_checkpoint
from strop.runtime.sft.session import SFTSession
from strop.runtime.sft.validation import validate
from strop.types import StropError

_LINES = 20  # printed over a run, beside those of steps with a validation


def imitate(session: SFTSession, stop: interrupts.StopFlag) -> None:
    """Make the steps that are left. A run that is asked to stop does so between two steps."""
    if session.step == 0 and session.held_out:
        _validate(session)
        _record(session, {"step": 0})
    while session.step < session.num_steps and not session.has_lost_patience:
        session.is_within_step = True
        try:
            flat = _learn(session)
        except StropError:  # before the optimizer moved: the step before is whole
            session.is_within_step = False
            raise
        write_checkpoint = None
        try:
            if session.held_out and _is_validation_due(session):
                _validate(session)
            session.is_within_step = False
            if _is_checkpoint_due(session):
                write_checkpoint = ready_sft_checkpoint(session)
        finally:  # the step is made, whatever becomes of its validation and its checkpoint
            _record(session, flat)
        if write_checkpoint is not None:
            session.writer.start(session.step, write_checkpoint)
        session.writer.check()
        if stop.is_set:
            session.console.warn(f"interrupted after step {session.step}; saving.")
            return
    if session.has_lost_patience:
        session.console.note(
            f"stopped after step {session.step}: no lower validation loss in the last {session.best.num_since} validations "
            "(validation.patience)."
        )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_checkpoint_due(session: SFTSession) -> bool:
    is_best = bool(session.held_out) and session.best.step == session.step
    return session.config.run.is_checkpoint_due(session.step, is_best=is_best)


def _is_validation_due(session: SFTSession) -> bool:
    is_last = session.step == session.num_steps
    return is_last or _is_due(session.step, session.config.validation.every_steps)


def _learn(session: SFTSession) -> dict[str, float]:
    """One optimizer step; returns its line of metrics."""
    trainer, console = session.trainer, session.console
    with console.phase("train", session.num_steps):
        console.advance(session.step)
        batch = demonstration_batch([session.demonstrations[row] for row in session.next_rows()])
        metrics = trainer.step(weighted(batch, session.config), LikelihoodObjective())
        trainer.publish()
        session.step += 1
        session.cursor_state = session.cursor.state()
        console.advance(session.step)
    return {
        "step": session.step,
        **{name: metric.value for name, metric in metrics.items()},
        "epoch": session.rows_taken / len(session.demonstrations),
        "tokens_per_second": batch.tokens.numel() / max(console.phase_seconds["train"], 1e-9),
    }


def weighted(batch: Batch, config: SFTConfig) -> Batch:
    """A step's batch with its token weights: every step's add up by themselves, however few demonstrations it has."""
    weights = ops.token_weights(
        batch.loss_mask,
        batch.sequence_ids,
        reduction=config.loss.reduction,
        max_response_tokens=config.data.max_length_tokens,
    )
    return replace(batch, token_weights=weights)


def _validate(session: SFTSession) -> None:
    """Validate the model as it is, and keep it if none was better."""
    found = validate(session.trainer, session.held_out, step=session.step, console=session.console)
    session.validations.append(found)
    session.best = session.best.after(found)
    is_best = session.best.step == found.step
    session.console.note(
        f"validation after step {found.step}: loss {found.loss:.4f}, perplexity {found.perplexity:.3f} over "
        f"{found.num_tokens} tokens{' (the best so far)' if is_best else ''}"
    )
    if is_best and session.config.validation.keep_best:
        best = json.dumps({"step": found.step, "validation_loss": found.loss})
        session.folder.write_best(session.loaded.model, session.loaded.tokenizer, {"best.json": best})


def _record(session: SFTSession, flat: dict[str, float]) -> None:
    """One line of numbers for the step, in the run folder, and now and then on the console."""
    step, num_steps = session.step, session.num_steps
    is_validated = bool(session.validations) and session.validations[-1].step == step
    if is_validated:
        flat = flat | session.validations[-1].metrics()
    if not session.history:  # the files are read once
        flat = flat | {name: count for name, count in session.left_out.items() if count}
    flat = flat | {f"seconds/{name}": value for name, value in session.console.phase_seconds.items()}
    session.history.append(flat)
    append_metrics(session.folder.metrics, flat)
    is_shown = step in (1, num_steps) or step % max(1, num_steps // _LINES) == 0 or is_validated
    if is_shown and step > 0:
        session.console.step(step, num_steps, flat)
    session.console.phase_seconds.clear()
