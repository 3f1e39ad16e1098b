"""What the commands share: their group, flags of any option, and how a config is read for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from strop import __version__

OPTIONS_HELP = """
Any option of the config may follow as a flag: its whole path (--algorithm.policy_loss.eps_clip 0.2) or its last name, where
that occurs once outside [eval] and [validation] (--eps-clip 0.2); options of those are written whole (--eval.top_p 0.9). In
`strop eval` a last name that [eval] has means that option (--top-p 0.9).

`strop explain CONFIG` lists all options with their values.
"""
ANY_FLAGS = {"ignore_unknown_options": True, "allow_interspersed_args": True}


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[--OPTION VALUE]...")(command)


class Resumable(click.Command):
    """A command whose --resume may have a word after it, or none: what follows belongs to it only if it is such a word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_with_word(args)))


def _with_word(args: list[str]) -> Iterator[str]:
    from strop.config.resuming import is_resume_word

    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--resume":
            word = f"--resume={rest.pop(0) if rest and is_resume_word(rest[0]) else 'newest'}"
        yield word


def with_resume(command: Callable[..., Any]) -> Callable[..., Any]:
    resume = click.option(
        "--resume",
        metavar="[auto|best|step_NNNNNN]",
        help="Go on from the newest complete checkpoint in the run folder. auto: if there is one, else begin the run; best: "
        "from that of the best evaluation; step_000040: from that one.",
    )
    allow = click.option(
        "--allow-change",
        multiple=True,
        metavar="OPTION",
        help="An option, or a table, that may differ from the run that is resumed; data begins the data anew. May be given "
        "several times.",
    )
    return resume(allow(command))


def with_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--cluster",
        metavar="ADDRESS",
        help="Run on a Ray cluster, each of trainer.num_processes an actor: ray://HOST:10001, HOST:6379, auto (inside of a Ray "
        "job, or on a machine of a cluster), or local (one of this machine, for this run alone).",
    )(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="strop")
def cli() -> None:
    """strop improves a language model by reinforcement learning: it samples answers, scores them, and updates the model
    so that better answers become likelier.

    A run is one TOML file; `strop train --help` says how to change its options from the command line.
    """


def config_of(target: Path) -> Path:
    """The config of a run folder, or the config itself."""
    return target / "config.toml" if target.is_dir() else target


def allowed_of(command: Any, names: tuple[str, ...], resume: str | None) -> tuple[str, ...]:
    """What --allow-change names, as whole paths."""
    from strop.config.load import ROOTS
    from strop.config.resuming import allowed_changes, resume_word

    word = None if resume is None else resume_word(resume)
    return tuple(allowed_changes(ROOTS[command], names, resumes=word is not None))


def load(
    path: Path, flags: tuple[str, ...], command: Any, *, runs: bool = False, from_rollouts: Path | None = None
) -> Any:
    """The config with the flags laid over it. `runs`: what it names on disk is needed now."""
    from strop.config.files import check_files
    from strop.config.load import ROOTS, load_config
    from strop.config.overrides import parse_flags

    given = parse_flags(ROOTS[command], flags)
    if from_rollouts is not None:
        given["rollout.from_folder"] = str(from_rollouts)
    config = load_config(path, given, command=command)
    if from_rollouts is not None and config.origin("algorithm.old_logprobs") == "default" and config.may_use_recorded:
        config = load_config(path, {**given, "algorithm.old_logprobs": "rollout"}, command=command)
    if runs:
        check_files(config, trains=True)
    return config
