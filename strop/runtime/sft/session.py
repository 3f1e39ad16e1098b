"""Everything that a run of `strop sft` holds, opened in one place from its config."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from strop import interrupts
from strop.config import DemonstrationOptions, SFTConfig, warmup_fits
from strop.data import Demonstration, PromptCursor, load_demonstrations, special_ids
from strop.engines import max_positions
from strop.observe.console import Console
from strop.runtime.models import LoadedModel, load_model, set_threads
from strop.runtime.ranks import open_ranks
from strop.runtime.run_folder import RunFolder
from strop.runtime.session import warn_of_left_out
from strop.runtime.sft.validation import Best, Validation
from strop.runtime.writer import CheckpointWriter
from strop.trainers import TorchTrainer, attach_adapters, check_peft
from strop.types import ConfigError

T = TypeVar("T")


@dataclass
class SFTSession:
    """The parts of a run. `step` counts optimizer steps that are made."""

    config: SFTConfig
    console: Console
    folder: RunFolder
    loaded: LoadedModel
    demonstrations: tuple[Demonstration, ...]
    held_out: tuple[Demonstration, ...]
    cursor: PromptCursor
    trainer: TorchTrainer
    num_steps: int  # of the whole run
    left_out: dict[str, int]  # of the files: what was not read, dropped or cut, by the names of metrics.jsonl
    step: int = 0
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)
    went_back: bool = False  # to an earlier checkpoint than the newest
    is_within_step: bool = False  # a step is made and not yet validated and written down: no state to resume from
    cursor_state: dict[str, Any] = field(default_factory=dict)  # where the data stood when `step` was done
    best: Best = field(default_factory=Best)
    history: list[dict[str, float]] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)

    @cached_property
    def fingerprint(self) -> str:
        return _fingerprint(self.demonstrations)

    @cached_property
    def held_out_fingerprint(self) -> str:
        return _fingerprint(self.held_out)

    @property
    def rows_taken(self) -> int:
        """Demonstrations learned so far, over all passes."""
        return self.cursor_state["epoch"] * len(self.demonstrations) + self.cursor_state["position"]

    @property
    def has_lost_patience(self) -> bool:
        patience = self.config.validation.patience
        return patience is not None and self.best.num_since >= patience

    def next_rows(self) -> list[int]:
        """The rows of the next step; the last step of a run of whole passes takes what is left."""
        size = self.config.data.batch_size
        if self.config.run.num_steps is None:
            size = min(size, self.config.run.num_epochs * len(self.demonstrations) - self.rows_taken)
        return self.cursor.take(size)

    def set_place(self, step: int, cursor_state: dict[str, Any]) -> None:
        """Go to where a step had been made, from which the number of steps left follows."""
        self.step, self.cursor_state = step, cursor_state
        self.cursor.load_state(cursor_state)
        self.num_steps = step + _steps_left(self.config, len(self.demonstrations), step, self.rows_taken)
        self.trainer.set_total_steps(self.num_steps)


def _steps_left(config: SFTConfig, num_rows: int, step: int, rows_taken: int) -> int:
    if config.run.num_steps is not None:
        return config.run.num_steps - step
    return -(-(config.run.num_epochs * num_rows - rows_taken) // config.data.batch_size)


def open_sft_session(config: SFTConfig, console: Console, folder: RunFolder, processes: ExitStack) -> SFTSession:
    """Load what the config names, and check its parts against one another. Other ranks of the trainer end with `processes`."""
    set_threads(config.trainer.num_threads, num_processes=config.trainer.num_processes)
    check_peft(config.lora)
    loaded = load_model(config.model)
    interrupts.check()
    demonstrations, left_out = _load("data", config.data, loaded, console)
    held_out: tuple[Demonstration, ...] = ()
    if config.validation.data is not None:
        held_out, left_out_there = _load("validation.data", config.validation.data, loaded, console)
        left_out |= left_out_there
    num_steps = _steps_left(config, len(demonstrations), 0, 0)
    passes = f"run.num_epochs = {config.run.num_epochs} x {len(demonstrations)} demonstrations"
    product = f"{passes} / data.batch_size = {config.data.batch_size}"
    problems = [f"{key} {message}" for key, message in warmup_fits("trainer", config.trainer, num_steps, product)]
    if problems:
        raise ConfigError("\n".join(problems))
    if config.run.num_steps is None:
        for warning in config.waiting_for(num_steps, f"the run's {num_steps} steps"):
            console.warn(warning)
    _warn_of_ends(loaded, demonstrations, console)
    cursor = PromptCursor(len(demonstrations), seed=config.seed, shuffle=config.data.shuffle)
    attach_adapters(loaded.model, config.lora, seed=config.seed)
    ranks = processes.enter_context(open_ranks(config.trainer, device=loaded.model.device))
    trainer = ranks.make(TorchTrainer, loaded.model, config.trainer, total_steps=num_steps)
    return SFTSession(
        config=config,
        console=console,
        folder=folder,
        loaded=loaded,
        demonstrations=demonstrations,
        held_out=held_out,
        cursor=cursor,
        trainer=trainer,
        num_steps=num_steps,
        left_out=left_out,
        cursor_state=cursor.state(),
    )


def _load(
    table: str, options: DemonstrationOptions, loaded: LoadedModel, console: Console
) -> tuple[tuple[Demonstration, ...], dict[str, int]]:
    """Its demonstrations, and how many of the file's there are not, or not whole."""

    def watched(rows: Sequence[T]) -> Iterator[T]:
        with console.phase(f"read {table}", len(rows)):
            for number, row in enumerate(rows):
                yield row
                console.advance(number + 1)

    limit = max_positions(loaded.model)
    found = load_demonstrations(options, loaded.tokenizer, table=table, max_positions=limit, watch=watched)
    warn_of_left_out(console, table, found.num_skipped)
    longest = options.max_length_tokens or limit
    for number, what in ((found.num_dropped, "left out"), (found.num_truncated, "cut")):
        if number:
            console.warn(
                f"{table}: {number} demonstrations of more than {longest} tokens were {what}, as {table}.too_long = "
                f"{options.too_long} asks."
            )
    if options.train_on == "last" and found.num_conversations == 0:
        console.warn(
            f'{table}.train_on = "last" changes nothing: all rows are a prompt and a response, and that is learned anyway.'
        )
    console.phase_seconds.clear()
    counts = {
        "num_skipped_lines": found.num_skipped,
        "num_dropped": found.num_dropped,
        "num_truncated": found.num_truncated,
    }
    return found.demonstrations, {f"{table}/{name}": count for name, count in counts.items()}


def _warn_of_ends(loaded: LoadedModel, demonstrations: Sequence[Demonstration], console: Console) -> None:
    """A turn may be taught to end with a token at which nobody stops when the model is sampled."""
    ends = {
        token
        for d in demonstrations
        for token, now, later in zip(d.tokens, d.response_mask, (*d.response_mask[1:], False), strict=True)
        if now and not later
    }
    unheard = sorted((ends & special_ids(loaded.tokenizer)) - loaded.stop_token_ids)
    if unheard:
        named = ", ".join(f"{loaded.tokenizer.convert_ids_to_tokens(i)} (id {i})" for i in unheard)
        console.warn(
            f"data: turns end with {named}, at which the model does not stop when it is sampled. Add it to eos_token_id in the "
            "model's generation_config.json, or to rollout.stop_token_ids of strop train."
        )


def _fingerprint(demonstrations: Sequence[Demonstration]) -> str:
    """Of all demonstrations: their tokens, and which of them are learned."""
    digest = hashlib.sha256()
    for d in demonstrations:
        digest.update(repr((d.tokens, d.response_mask)).encode())
    return digest.hexdigest()
