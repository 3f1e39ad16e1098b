"""Everything that a training run holds, opened in one place from its config."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from strop import interrupts
from strop.algorithms import PolicyObjective
from strop.config import DataOptions, RewardOptions, TrainConfig, to_toml
from strop.data import PromptCursor, load_prompts
from strop.engines import TorchEngine
from strop.observe.console import Console
from strop.rewards import Scorer, label_check, make_scorer
from strop.rollout.single_turn import Decode
from strop.runtime.evaluation import Evaluation
from strop.runtime.models import LoadedModel, check_length, check_stop_token_ids, load_model, set_threads
from strop.runtime.run_folder import RunFolder
from strop.runtime.teachers import Teachers, open_teachers
from strop.trainers import TorchTrainer
from strop.types import Engine, Prompt


@dataclass
class Session:
    """The parts of a run. `step` counts batches of rollouts that are done."""

    config: TrainConfig
    console: Console
    folder: RunFolder
    loaded: LoadedModel
    prompts: tuple[Prompt, ...]
    eval_prompts: tuple[Prompt, ...]
    cursor: PromptCursor
    scorer: Scorer
    objective: PolicyObjective
    engine: Engine
    trainer: TorchTrainer
    decode: Decode
    teachers: Teachers | None = None
    step: int = 0
    saved_step: int = -1  # that the newest checkpoint holds
    is_within_step: bool = False  # between the first and the last update of a batch: no state to resume from
    has_told_of_group_of_one: bool = False
    cursor_state: dict[str, Any] = field(default_factory=dict)  # where the data stood when `step` was done
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    @cached_property
    def prompts_fingerprint(self) -> str:
        """Of all prompts as token ids, with what a scorer sees of them."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(repr((prompt.tokens, prompt.label, dict(prompt.metadata))).encode())
        return digest.hexdigest()


def open_session(config: TrainConfig, console: Console, folder: RunFolder) -> Session:
    """Load what the config names. What is cheap to get wrong comes first, the model's weights last."""
    scorer = make_scorer(config.reward)
    set_threads(config.trainer.num_threads)
    interrupts.check()
    loaded = load_model(config.model)
    interrupts.check()
    check_stop_token_ids(loaded, config.rollout.stop_token_ids)
    prompts = _load("data", config.data, config.reward, loaded, console)
    _check_lengths(loaded, prompts, "rollout", config.rollout.max_response_tokens)
    held_out = load_held_out(config, loaded, console)
    teachers = open_teachers(config, loaded, prompts, console)
    cursor = PromptCursor(len(prompts), seed=config.seed, shuffle=config.data.shuffle)
    objective = PolicyObjective(
        config.algorithm,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return Session(
        config=config,
        console=console,
        folder=folder,
        loaded=loaded,
        prompts=prompts,
        eval_prompts=held_out,
        cursor=cursor,
        scorer=scorer,
        objective=objective,
        engine=make_engine(config, loaded),
        trainer=TorchTrainer(
            loaded.model,
            config.trainer,
            total_steps=config.num_optimizer_steps,
            max_logprob_gap=config.max_logprob_gap,
            keeps_reference=objective.uses_reference,
        ),
        decode=decoder(loaded),
        teachers=teachers,
        cursor_state=cursor.state(),
    )


def load_held_out(config: TrainConfig, loaded: LoadedModel, console: Console) -> tuple[Prompt, ...]:
    """The prompts of `eval.data`, each short enough to be answered; none without that table."""
    if config.eval.data is None:
        return ()
    prompts = _load("eval.data", config.eval.data, config.reward, loaded, console)
    own = config.eval.max_response_tokens
    limit = ("rollout", config.rollout.max_response_tokens) if own is None else ("eval", own)
    _check_lengths(loaded, prompts, *limit)
    return prompts


def _load(
    table: str, options: DataOptions, reward: RewardOptions, loaded: LoadedModel, console: Console
) -> tuple[Prompt, ...]:
    found = load_prompts(options, loaded.tokenizer, check_label=label_check(reward))
    if found.num_skipped:
        console.warn(f"{table}: {found.num_skipped} broken lines were left out, as skip_bad_lines asks.")
    return found.prompts


def make_engine(config: TrainConfig, loaded: LoadedModel) -> TorchEngine:
    """The engine that `[engine]` names, sampling from the loaded model's own weights."""
    return TorchEngine(loaded.model, stop_token_ids=loaded.stop_token_ids, max_sequences=config.engine.max_sequences)


def decoder(loaded: LoadedModel) -> Decode:
    """Token ids to the text that scorers and people read."""
    return partial(loaded.tokenizer.decode, skip_special_tokens=True)


def _check_lengths(loaded: LoadedModel, prompts: tuple[Prompt, ...], table: str, max_response_tokens: int) -> None:
    longest = max(prompts, key=lambda p: len(p.tokens))
    check_length(
        loaded.model,
        f"prompt row {longest.row}",
        len(longest.tokens),
        option=f"{table}.max_response_tokens",
        max_response_tokens=max_response_tokens,
    )


def write_start(session: Session, formula: str) -> None:
    """What the run folder says of a run before its first step."""
    session.folder.config.write_text(to_toml(session.config), encoding="utf-8")
    session.folder.objective.write_text(formula, encoding="utf-8")
    session.folder.rollouts.mkdir(exist_ok=True)
