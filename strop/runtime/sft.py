"""`strop sft` as a function: imitate demonstrations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strop import interrupts, ops
from strop.algorithms import LikelihoodObjective
from strop.config import SFTConfig, to_toml
from strop.data import Demonstration, PromptCursor, demonstration_batch, load_demonstrations
from strop.observe.console import Console, QuietConsole
from strop.observe.metrics_file import append_metrics
from strop.observe.report import write_report
from strop.runtime.models import LoadedModel, check_length, has_finite_weights, load_model, set_threads
from strop.runtime.run_folder import RunFolder
from strop.trainers import TorchTrainer

_LINES = 20  # printed over a run
_OBJECTIVE = "minimise  -(mean over the step's response tokens of logprobs_t)\n"


@dataclass(frozen=True)
class SFTResult:
    """What a run left behind."""

    folder: Path
    model: Path
    steps: list[dict[str, float]]
    interrupted: bool


def sft(config: SFTConfig, *, console: Console | None = None) -> SFTResult:
    """Fine-tune a model on demonstrations: each optimizer step on `data.batch_size` of them.

    Raises:
        UserError: something a user can mend; nothing was trained.
        GuardError: a loss or gradient was not finite; the model from before it is in the run folder.
    """
    console = console or QuietConsole()
    folder = RunFolder(config.folder)
    with folder.held(overwrite=config.run.overwrite):
        loaded, demonstrations = _open(config, console)
        interrupts.check()
        if config.run.overwrite:
            folder.clear()
        history: list[dict[str, float]] = []
        with interrupts.stop_flag() as stop:
            try:
                folder.config.write_text(to_toml(config), encoding="utf-8")
                folder.objective.write_text(_OBJECTIVE, encoding="utf-8")
                _steps(config, loaded, demonstrations, console, folder, history, stop)
            finally:
                what = f"model: {folder.model}"
                if has_finite_weights(loaded.model):
                    folder.write_model(loaded.model, loaded.tokenizer)
                else:
                    what = "no model was written: its weights are not finite"
                write_report(
                    folder.report, title=folder.path.name, metrics=history, objective=_OBJECTIVE, rollouts=None
                )
        console.note(f"{what}    report: {folder.report}")
    return SFTResult(folder.path, folder.model, history, stop.is_set)


def _open(config: SFTConfig, console: Console) -> tuple[LoadedModel, Sequence[Demonstration]]:
    """Model and demonstrations, checked against one another."""
    set_threads(config.trainer.num_threads)
    loaded = load_model(config.model)
    found = load_demonstrations(config.data, loaded.tokenizer)
    longest = max(found.demonstrations, key=lambda d: len(d.tokens))
    check_length(loaded.model, f"demonstration row {longest.row}", len(longest.tokens))
    if found.num_skipped:
        console.warn(f"data: {found.num_skipped} broken lines were left out, as skip_bad_lines asks.")
    return loaded, found.demonstrations


def _steps(
    config: SFTConfig,
    loaded: LoadedModel,
    demonstrations: Sequence[Demonstration],
    console: Console,
    folder: RunFolder,
    history: list[dict[str, float]],
    stop: interrupts.StopFlag,
) -> None:
    trainer = TorchTrainer(loaded.model, config.trainer, total_steps=config.num_optimizer_steps)
    cursor = PromptCursor(len(demonstrations), seed=config.seed, shuffle=config.data.shuffle)
    objective, num_steps = LikelihoodObjective(), config.run.num_steps
    with console.phase("train", num_steps):
        for step in range(1, num_steps + 1):
            start = time.perf_counter()
            batch = demonstration_batch([demonstrations[row] for row in cursor.take(config.data.batch_size)])
            weights = ops.token_weights(batch.loss_mask, batch.sequence_ids, reduction="token_mean")
            metrics = trainer.step(replace(batch, token_weights=weights), objective)
            rate = batch.tokens.numel() / (time.perf_counter() - start)
            flat = {"step": step, **{name: m.value for name, m in metrics.items()}, "tokens_per_second": rate}
            history.append(flat)
            append_metrics(folder.metrics, flat)
            console.advance(step)
            if step in (1, num_steps) or step % max(1, num_steps // _LINES) == 0:
                console.step(step, num_steps, flat)
            if stop.is_set:
                console.warn(f"interrupted after step {step}; saving.")
                return
