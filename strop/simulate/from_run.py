"""Times and lengths of a run, from metrics.jsonl and rollouts/ in its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from strop.config.engine import VLLMInProcessOptions
from strop.config.load import load_config
from strop.config.root import TrainConfig
from strop.config.simulation import SimulationConfig
from strop.observe.metrics_file import read_metrics
from strop.observe.rollout_file import step_files
from strop.simulate.engine import decode_seconds
from strop.types import DataError, UserError

_SEQUENCES_FLAGS = {
    "vllm": "--max-num-seqs",
    "vllm_in_process": "--max-num-seqs",
    "sglang": "--max-running-requests",
}
_SERVER_SEQUENCES = 256  # of a server that is not told otherwise: vLLM's default; SGLang's follows from its memory
_TOLD_APART = 1.5  # by this factor the ratio of two parts must differ between steps
_TRAINING = ("logprobs", "teacher", "train")  # phases between scores and new weights


class MeasuredStep(NamedTuple):
    """What a run wrote down about a step."""

    step: int
    seconds: dict[str, float]  # by phase
    groups: list[list[int]]  # lengths of responses, in tokens, by group
    prompt_tokens: int  # of the prompts of all rollouts; 0 where the run kept texts alone

    @property
    def lengths(self) -> list[int]:
        return [length for group in self.groups for length in group]

    @property
    def num_tokens(self) -> int:
        """What training reads."""
        return sum(self.lengths) + self.prompt_tokens

    def training_seconds(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in _TRAINING)

    def total_seconds(self) -> float:
        """Of the phases that a simulation has."""
        return self.training_seconds() + sum(self.seconds.get(phase, 0.0) for phase in ("sample", "score", "weights"))


class MeasuredRun(NamedTuple):
    """A run's config and its steps."""

    config: TrainConfig
    steps: list[MeasuredStep]


def measure(runs: Sequence[Path]) -> dict[str, Any]:
    """Options of a plan that the folders of runs of strop train give: times from all of them, the rest from the first.

    Raises:
        UserError: one is no such folder, or lacks metrics or rollouts.
    """
    for run in runs:
        if not (run / "config.toml").is_file():
            raise UserError(
                f"--from-run must be the folder of a run of strop train, got {str(run)!r}: it has no config.toml."
            )
    configs = [load_config(run / "config.toml") for run in runs]
    for run, config in zip(runs, configs, strict=True):
        if config.rollout.max_off_policy_steps:
            raise UserError(
                f"--from-run must be a run whose sampling and training take turns, got {str(run)!r}, which has "
                f"rollout.max_off_policy_steps = {config.rollout.max_off_policy_steps}: side by side each slows the other "
                "down, and no times can be read off. Measure a few steps with 0."
            )
    return fit([MeasuredRun(config, read_steps(run)) for run, config in zip(runs, configs, strict=True)])


def read_steps(run: Path) -> list[MeasuredStep]:
    """The steps of which there are times and rollouts, without the first one, which warms up, where there are more than two.

    Raises:
        UserError: there is no such step.
    """
    rows = {row["step"]: row for row in read_metrics(run / "metrics.jsonl") if "seconds/sample" in row}
    steps = [_read(step, path, rows[step]) for step, path in step_files(run / "rollouts") if step in rows]
    if not steps:
        raise UserError(
            f"--from-run must have steps with times in metrics.jsonl and rollouts in rollouts/, got {str(run)!r}, which has "
            "none. A run records them with run.save_rollouts = true."
        )
    return steps[1:] if len(steps) > 2 else steps


def _read(step: int, path: Path, metrics: dict[str, float]) -> MeasuredStep:
    seconds = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")}
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        prompt_tokens = sum(int(row.get("prompt_length", 0)) for row in rows)
        groups = [
            [max(1, int(row["num_response_tokens"])) for row in group]
            for _, group in groupby(rows, key=lambda row: row.get("group", row["prompt_row"]))
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: the lines must be rollouts as strop writes them: {type(error).__name__}: {error}."
        ) from error
    if not groups:
        raise DataError(f"{path}: there must be rollouts in the file, got none.")
    return MeasuredStep(step, seconds, groups, prompt_tokens)


def fit(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """The options of a plan in which the steps of these runs take as long as they did, in the sum.

    Sampling is fitted as `decode_step_s D + decode_sequence_s W`, D the decode steps that the lengths of a step take with the
    engine's places, W the tokens of the engine that is busiest; training as `train_token_s tokens + train_step_s`.
    """
    config, first = runs[0]
    steps = [step for run in runs for step in run.steps]
    lengths = [length for step in first for length in step.lengths]
    training = [step.training_seconds() for step in steps]
    tokens = [step.num_tokens / run.config.trainer.num_processes for run in runs for step in run.steps]
    decode_step_s, decode_sequence_s = _two_parts(
        _counted(runs, step_s=1, sequence_s=0),
        _counted(runs, step_s=0, sequence_s=1),
        [step.seconds["sample"] for step in steps],
    )
    train_token_s, train_step_s = _two_parts(tokens, [1.0] * len(steps), training)
    return _engines(config) | {
        "prompts_per_step": config.rollout.prompts_per_step,
        "group_size": config.rollout.group_size,
        "updates_per_batch": config.algorithm.updates_per_batch,
        "max_off_policy_steps": config.algorithm.updates_per_batch,  # one batch ahead
        "response_tokens": lengths,
        "prompt_tokens": sum(step.prompt_tokens for step in first) / len(lengths),
        "decode_step_s": decode_step_s,
        "decode_sequence_s": decode_sequence_s,
        "score_s": sum(step.seconds.get("score", 0.0) for step in steps) / sum(len(step.lengths) for step in steps),
        "scores_early": False,  # score_s is what was left to wait for when all was sampled
        "num_trainers": config.trainer.num_processes,
        "train_step_s": train_step_s,
        "train_token_s": train_token_s,
        "transfer_s": sum(step.seconds.get("weights", 0.0) for step in steps) / len(steps),
    }


def _engines(config: TrainConfig) -> dict[str, Any]:
    """An engine in the trainer's process shares its GPUs; servers have their own."""
    engine = config.engine
    if engine.kind == "torch":
        return {"num_engines": 1, "max_sequences": engine.max_sequences, "shared_gpus": True}
    is_here = isinstance(engine, VLLMInProcessOptions)
    args = [part for arg in (engine.engine_args if is_here else engine.server_args) for part in arg.split("=")]
    flag = _SEQUENCES_FLAGS[engine.kind]
    sequences = args[args.index(flag) + 1] if flag in args[:-1] else ""
    return {
        "num_engines": 1 if is_here else len(engine.addresses) or engine.num_servers,
        "max_sequences": int(sequences) if sequences.isdigit() else _SERVER_SEQUENCES,
        "shared_gpus": is_here,
    }


def _counted(runs: Sequence[MeasuredRun], *, step_s: float, sequence_s: float) -> list[float]:
    """Seconds that each step would take in its run's engines at these times."""
    found = list[float]()
    for config, steps in runs:
        plan = SimulationConfig(**_engines(config), decode_step_s=step_s, decode_sequence_s=sequence_s)
        found += [decode_seconds(plan, step.groups) for step in steps]
    return found


def _two_parts(main: Sequence[float], other: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b), neither below 0, with a main + b other nearest to the seconds of each step, and equal to them in the sum. b is 0
    where the steps are too much alike to tell both apart."""
    y, columns = np.asarray(seconds, dtype=float), np.array([main, other], dtype=float)
    ratio = columns[1] / columns[0]
    found = np.array([1.0, 0.0])
    if ratio.max() > _TOLD_APART * ratio.min():
        both = np.linalg.lstsq(columns.T, y, rcond=None)[0]
        alone = [np.eye(2)[i] * y.sum() / columns[i].sum() for i in (0, 1)]
        found = both if (both >= 0).all() else min(alone, key=lambda ab: float(((ab @ columns - y) ** 2).sum()))
    predicted = float((found @ columns).sum())
    a, b = (found * (y.sum() / predicted if predicted else 0.0)).tolist()
    return a, b
