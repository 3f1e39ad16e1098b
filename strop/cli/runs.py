"""Commands that train, sample, or redo a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from strop import interrupts
from strop.cli.shared import (
    ANY_FLAGS,
    OPTIONS_HELP,
    Resumable,
    allowed_of,
    cli,
    load,
    with_cluster,
    with_flags,
    with_resume,
)
from strop.types import UserError


@cli.command(cls=Resumable, context_settings=ANY_FLAGS, epilog=OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@with_resume
@with_cluster
@click.option(
    "--from-rollouts",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Sample nothing: learn from the rollouts in FOLDER (of a run, or of strop rollout), with ratios to their recorded "
    "log-probabilities unless the config corrects otherwise.",
)
@with_flags
def train(
    config: Path,
    resume: str | None,
    allow_change: tuple[str, ...],
    cluster: str | None,
    from_rollouts: Path | None,
    flags: tuple[str, ...],
) -> None:
    """Train a model by reinforcement learning.

    Writes runs/NAME: config.toml, objective.txt, metrics.jsonl, rollouts/, model/ and report.html. Ctrl-C stops between two
    steps and saves (exit code 130); a second one stops at once.
    """
    allowed = allowed_of("train", allow_change, resume)
    loaded = load(config, flags, "train", runs=_is_here(cluster), from_rollouts=from_rollouts)
    from strop.runtime import train as run

    _run_steps(run, loaded, resume, allowed, cluster, title=config.stem)


@cli.command(cls=Resumable, context_settings=ANY_FLAGS, epilog=OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@with_resume
@with_cluster
@with_flags
def sft(
    config: Path, resume: str | None, allow_change: tuple[str, ...], cluster: str | None, flags: tuple[str, ...]
) -> None:
    """Fine-tune a model on demonstrations: conversations, or prompts with their responses.

    Writes runs/NAME: config.toml, objective.txt, metrics.jsonl, model/, best/ (with [validation.data]) and report.html. Ctrl-C
    stops between two steps and saves (exit code 130); a second one stops at once.
    """
    allowed = allowed_of("sft", allow_change, resume)
    loaded = load(config, flags, "sft", runs=_is_here(cluster))
    from strop.runtime import sft as run

    _run_steps(run, loaded, resume, allowed, cluster, title=config.stem)


def _is_here(cluster: str | None) -> bool:
    """Whether files that a config names have to be on this machine."""
    return cluster in (None, "local")


def _run_steps(
    run: Callable[..., Any], config: Any, resume: str | None, allowed: Any, cluster: str | None, *, title: str
) -> None:
    """Train or fine-tune here or on a cluster; exit code 130 where that was interrupted."""
    from strop.observe.console import TerminalConsole

    interrupts.check()
    console, given = TerminalConsole(title=title), {"resume": resume or False, "allow_change": allowed}
    if cluster is None:
        with console.live():
            result = run(config, **given, console=console)
    else:
        from strop.runtime.cluster.driver import run_on_cluster

        result = run_on_cluster(cluster, run, config, **given, console=console)
    if result.interrupted:
        sys.exit(130)


@cli.command(context_settings=ANY_FLAGS, epilog=OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The folder to write; else runs/NAME-rollouts.")
@with_flags
def rollout(config: Path, output: Path | None, flags: tuple[str, ...]) -> None:
    """Sample and score as strop train would, without training: --num-steps N batches.

    Writes step_000001.jsonl and so on; strop train CONFIG --from-rollouts FOLDER learns from them. Ctrl-C keeps what is whole.
    """
    loaded = load(config, flags, "train", runs=True)
    from strop.observe.console import TerminalConsole
    from strop.observe.replay_tables import print_tallies
    from strop.runtime.roll_out import roll_out

    interrupts.check()

    folder = output or loaded.folder.with_name(f"{loaded.folder.name}-rollouts")
    console = TerminalConsole(title=config.stem)
    with console.live():
        tallies = roll_out(loaded, folder, console=console)
    print_tallies({name: tally.numbers() for name, tally in tallies.items()})
    click.echo(f"rollouts: {folder}")


@cli.command(context_settings=ANY_FLAGS, epilog=OPTIONS_HELP)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), required=True, help="The step to redo, counted from 1.")
@click.option(
    "--rollout", "line", type=int, metavar="K", help="Show the tokens of the rollout in line K of the step's file."
)
@with_flags
def replay(run: Path, step: int, line: int | None, flags: tuple[str, ...]) -> None:
    """Redo a training step of a run from its recorded rollouts, and compare it bit for bit.

    Begins at the newest checkpoint before the step, or at the run's first model. Nothing is sampled, and RUN stays as it
    is. Exit code 1 if loss, gradient norm or weights are not what they were.
    """
    if not (run / "config.toml").is_file():
        raise UserError(f"RUN must be the folder of a run of strop train, got {str(run)!r}: it has no config.toml.")
    loaded = load(run / "config.toml", flags, "train", runs=True)
    from strop.observe.console import TerminalConsole
    from strop.observe.replay_tables import print_replay
    from strop.runtime.replay import replay as redo

    interrupts.check()

    console = TerminalConsole(title=f"replay {step}")
    with console.live():
        found = redo(run, loaded, step=step, rollout=line, console=console)
    print_replay(found)
    if found.difference:
        click.secho(f"stopped: the step differs. {found.difference}", fg="red", err=True)
        sys.exit(1)
