"""`strop rollout` as a function: sample and score, and write what came of it. No trainer is made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev

from strop import interrupts
from strop.config import TrainConfig
from strop.observe.console import Console, QuietConsole
from strop.observe.rollout_file import step_files, write_rollouts
from strop.rewards import make_scorer
from strop.runtime.collect import collect
from strop.runtime.from_rollouts import write_about
from strop.runtime.session import SamplingSession, open_sampling
from strop.runtime.train import run_async
from strop.types import ConfigError, Rollout, UserError


@dataclass
class Tally:
    """Rewards and lengths of some rollouts."""

    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_truncated: int = 0

    def add(self, rollout: Rollout) -> None:
        if rollout.reward is not None:
            self.rewards.append(rollout.reward)
        self.lengths.append(rollout.num_response_tokens)
        self.num_truncated += rollout.finish_reason == "length"

    def numbers(self) -> dict[str, float]:
        """Counts, and what there is to say of rewards and lengths."""
        found: dict[str, float] = {"rollouts": len(self.lengths), "scored": len(self.rewards)}
        if self.rewards:
            found |= {"reward": fmean(self.rewards), "deviation": pstdev(self.rewards)}
            found |= {"lowest": min(self.rewards), "highest": max(self.rewards)}
        if self.lengths:
            found |= {"tokens": fmean(self.lengths), "longest": max(self.lengths)}
            found["truncated"] = self.num_truncated / len(self.lengths)
        return found


def roll_out(config: TrainConfig, folder: Path, *, console: Console | None = None) -> dict[str, Tally]:
    """Sample and score `run.num_steps` batches with the model as it is.

    Args:
        config: of `strop train`; what it says of training does not act.
        folder: where about.json and a file for each batch go; `strop train --from-rollouts` takes it.
        console: where progress goes.

    Returns:
        What all rollouts earned, under "", and those of each source that the data names.

    Raises:
        UserError: something a user can mend.
    """
    console = console or QuietConsole()
    if config.rollout.from_folder is not None:
        raise ConfigError(
            "rollout.from_folder must be none to sample, got a folder: rollouts are recorded in it already."
        )
    _check_free(folder)
    tallies = {"": Tally()}
    with closing(make_scorer(config.reward)) as scorer:
        session = open_sampling(config, console, scorer)
        try:
            write_about(folder, config)
        except OSError as error:
            raise UserError(
                f"--output must be a folder that can be written, got {str(folder)!r}: {error.strerror}."
            ) from None
        run_async(_sample(session, folder, tallies))
    return tallies


def _check_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output must be a folder, got {str(folder)!r}: it is a file.")
    if any(True for _ in step_files(folder)):
        raise UserError(
            f"--output must be a folder without rollouts, got {str(folder)!r}. Name another one, or remove it."
        )


async def _sample(session: SamplingSession, folder: Path, tallies: dict[str, Tally]) -> None:
    """Every batch is written whole before the next one begins: what is there when somebody stops it can be used."""
    assert session.engine is not None
    with interrupts.cancelling():
        try:
            while session.step < session.config.run.num_steps:
                rollouts, metrics = await collect(session)
                session.step += 1
                write_rollouts(folder / f"step_{session.step:06d}.jsonl", rollouts)
                _count(tallies, rollouts)
                _tell(session, rollouts, {name: metric.value for name, metric in metrics.items() if metric.count})
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            await session.engine.close()


def _count(tallies: dict[str, Tally], rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        for name in dict.fromkeys(["", rollout.prompt.source or ""]):
            tallies.setdefault(name, Tally()).add(rollout)


def _tell(session: SamplingSession, rollouts: Sequence[Rollout], metrics: dict[str, float]) -> None:
    seconds = session.console.phase_seconds
    metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
    num_tokens = sum(r.num_response_tokens for r in rollouts)
    metrics["tokens_per_second"] = num_tokens / max(sum(seconds.get(name, 0.0) for name in ("sample", "score")), 1e-9)
    session.console.step(session.step, session.config.run.num_steps, metrics)
