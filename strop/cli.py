"""The commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from strop import __version__, interrupts
from strop.types import ConfigError, StropError, UserError

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # spinning threads starve each other on a busy machine; before torch

_OPTIONS_HELP = """
Any option of the config may follow as a flag: its whole path (--algorithm.policy_loss.eps_clip 0.2) or its last name, where
that occurs once outside [eval] and [validation] (--eps-clip 0.2); options of those are written whole (--eval.top_p 0.9). In
`strop eval` a last name that [eval] has means that option (--top-p 0.9).

`strop explain CONFIG` lists all options with their values.
"""
_ANY_FLAGS = {"ignore_unknown_options": True, "allow_interspersed_args": True}


def _with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[--OPTION VALUE]...")(command)


class _Resumable(click.Command):
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


def _with_resume(command: Callable[..., Any]) -> Callable[..., Any]:
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


def _with_cluster(command: Callable[..., Any]) -> Callable[..., Any]:
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


@cli.command(cls=_Resumable, context_settings=_ANY_FLAGS, epilog=_OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@_with_resume
@_with_cluster
@click.option(
    "--from-rollouts",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Sample nothing: learn from the rollouts in FOLDER (of a run, or of strop rollout), with ratios to their recorded "
    "log-probabilities unless the config corrects otherwise.",
)
@_with_flags
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
    allowed = _allowed("train", allow_change, resume)
    loaded = _load(config, flags, "train", runs=_is_here(cluster), from_rollouts=from_rollouts)
    from strop.runtime import train as run

    _run_steps(run, loaded, resume, allowed, cluster, title=config.stem)


@cli.command(cls=_Resumable, context_settings=_ANY_FLAGS, epilog=_OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@_with_resume
@_with_cluster
@_with_flags
def sft(
    config: Path, resume: str | None, allow_change: tuple[str, ...], cluster: str | None, flags: tuple[str, ...]
) -> None:
    """Fine-tune a model on demonstrations: conversations, or prompts with their responses.

    Writes runs/NAME: config.toml, objective.txt, metrics.jsonl, model/, best/ (with [validation.data]) and report.html. Ctrl-C
    stops between two steps and saves (exit code 130); a second one stops at once.
    """
    allowed = _allowed("sft", allow_change, resume)
    loaded = _load(config, flags, "sft", runs=_is_here(cluster))
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


@cli.command(context_settings=_ANY_FLAGS, epilog=_OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The folder to write; else runs/NAME-rollouts.")
@_with_flags
def rollout(config: Path, output: Path | None, flags: tuple[str, ...]) -> None:
    """Sample and score as strop train would, without training: --num-steps N batches.

    Writes step_000001.jsonl and so on; strop train CONFIG --from-rollouts FOLDER learns from them. Ctrl-C keeps what is whole.
    """
    loaded = _load(config, flags, "train", runs=True)
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


@cli.command(context_settings=_ANY_FLAGS, epilog=_OPTIONS_HELP)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=1), required=True, help="The step to redo, counted from 1.")
@click.option(
    "--rollout", "line", type=int, metavar="K", help="Show the tokens of the rollout in line K of the step's file."
)
@_with_flags
def replay(run: Path, step: int, line: int | None, flags: tuple[str, ...]) -> None:
    """Redo a training step of a run from its recorded rollouts, and compare it bit for bit.

    Begins at the newest checkpoint before the step, or at the run's first model. Nothing is sampled, and RUN stays as it
    is. Exit code 1 if loss, gradient norm or weights are not what they were.
    """
    if not (run / "config.toml").is_file():
        raise UserError(f"RUN must be the folder of a run of strop train, got {str(run)!r}: it has no config.toml.")
    loaded = _load(run / "config.toml", flags, "train", runs=True)
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


@cli.command("eval", context_settings=_ANY_FLAGS, epilog=_OPTIONS_HELP)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--show", default=4, show_default=True, help="How many answers to print.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON instead of tables.")
@_with_flags
def eval_(target: Path, show: int, as_json: bool, flags: tuple[str, ...]) -> None:
    """Score a model on held-out prompts.

    TARGET is a config with [eval.data] or [eval.sets.NAME], a run folder, best/ in one, or any model's folder; of that the
    flags say the rest: strop eval MODEL --data.path FILE --reward.kind number.
    """
    from strop.config.eval_target import load_eval_config
    from strop.config.files import check_files
    from strop.config.load import ROOTS
    from strop.config.overrides import parse_flags

    loaded = load_eval_config(target, parse_flags(ROOTS["eval"], flags, is_eval=True))
    check_files(loaded, trains=False)
    from strop.observe.console import TerminalConsole
    from strop.observe.eval_tables import print_evaluation
    from strop.runtime import evaluate

    interrupts.check()

    console = TerminalConsole(title="eval", to_stderr=as_json)  # stdout is JSON and nothing else
    with console.live():
        found = evaluate(loaded, console=console)
    print_evaluation(found.scores, found.answers, title=loaded.model.path, show=show, as_json=as_json)


@cli.command(context_settings=_ANY_FLAGS, epilog=_OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--sft", "is_sft", is_flag=True, help="CONFIG is one of strop sft.")
@click.option("--diff", type=click.Path(path_type=Path), help="Print only where CONFIG and this one differ.")
@_with_flags
def explain(config: Path, is_sft: bool, diff: Path | None, flags: tuple[str, ...]) -> None:
    """Print every option with its value, where the value comes from, and the objective as a formula.

    CONFIG, and what --diff names, may be a run folder: its config is meant.
    """
    command = "sft" if is_sft else "train"
    loaded = _load(_config_of(config), flags, command)
    from strop.config.tree import walk
    from strop.observe.tables import print_differences, print_options

    if diff is not None:
        print_differences(loaded, _load(_config_of(diff), (), command), titles=(str(config), str(diff)))
        return
    print_options(loaded)
    for _, table in walk(loaded):
        for warning in table.warnings():
            click.secho(f"warning: {warning}", fg="yellow")
    from strop.algorithms import likelihood_formula, objective_formula

    click.echo("\n" + (likelihood_formula(loaded) if is_sft else objective_formula(loaded)))


@cli.command(context_settings=_ANY_FLAGS, epilog=_OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--sft", "is_sft", is_flag=True, help="CONFIG is one of strop sft.")
@click.option("--all", "every_kind", is_flag=True, help="Look at every other kind of every table too.")
@click.option("--only", default="", metavar="TABLE", help="Look at one table, such as algorithm, or at one option.")
@_with_flags
def audit(config: Path, is_sft: bool, every_kind: bool, only: str, flags: tuple[str, ...]) -> None:
    """Turn every option, one at a time, and show what each moves.

    CONFIG may be a run folder. Small runs on made-up prompts and scores go through the real objective, trainer and loop;
    neither your model nor your data is touched. Exit code 1 if there is an option that moves nothing, or one that could not
    be tried.
    """
    loaded = _load(_config_of(config), flags, "sft" if is_sft else "train")
    from strop.config.tree import values
    from strop.observe.console import TerminalConsole
    from strop.observe.tables import audit_summary, print_audit
    from strop.runtime.audit import FAILURES, check_only
    from strop.runtime.audit import audit as examine

    check_only(loaded, only, every_kind)
    interrupts.check()

    console, findings = TerminalConsole(title="audit"), []
    with console.live(), console.phase("audit", len(values(loaded))):
        for finding in examine(loaded, every_kind=every_kind, only=only):
            findings.append(finding)
            console.advance(len(findings))
    print_audit(findings)
    click.echo(audit_summary(findings))
    for verdict, what in zip(FAILURES, ("move nothing", "could not be tried"), strict=True):
        failed = [f for f in findings if f.verdict == verdict]
        if failed:
            names = ", ".join(dict.fromkeys(f"{f.path} ({f.variant})" if f.variant else f.path for f in failed))
            click.secho(f"stopped: these options {what}: {names}", fg="red", err=True)
    if any(f.verdict in FAILURES for f in findings):
        sys.exit(1)


class _Planned(click.Command):
    """A command whose --help lists the options of a plan, from the class that has them."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from strop.config.reference import entries
        from strop.config.simulation import SimulationConfig

        with formatter.section("Options of a plan, as flags or as lines of CONFIG"):
            formatter.write_dl(
                [
                    (
                        f"--{entry.path.replace('_', '-')}",
                        f"{entry.description} ({entry.takes}; default {entry.default})",
                    )
                    for entry in entries(SimulationConfig)
                ]
            )


@cli.command(cls=_Planned, context_settings=_ANY_FLAGS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG] [--OPTION VALUE]...")
@click.option(
    "--from-run",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="RUN",
    help="Take times and lengths from the folder of a run of strop train; CONFIG and flags win over them. Several runs, with "
    "batches of other sizes, tell more about times; the rest is the first one's.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a page with plots: plan.html.")
def simulate(words: tuple[str, ...], from_run: tuple[Path, ...], output: Path | None) -> None:
    """Plan a cluster: simulate the synchronous and the asynchronous loop, and propose a split of the GPUs.

    CONFIG is a TOML file with options of a plan. Printed are throughput, idle shares, staleness and cost. The asynchronous
    loop is that of strop train with rollout.max_off_policy_steps.
    """
    from strop.config.overrides import parse_flags
    from strop.config.simulation import SimulationConfig, load_simulation

    has_config = bool(words) and not words[0].startswith("--")
    if not has_config and not from_run:
        raise UserError("strop simulate needs a plan: name its TOML file, or a run with --from-run RUN.")
    flags = parse_flags(SimulationConfig, words[has_config:])
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise UserError(f"--output must be a file in a folder that is there, got {str(output)!r}.")
    from strop.observe.console import TerminalConsole
    from strop.simulate import examine, measure
    from strop.simulate.plan import print_findings, print_measured, write_plots

    interrupts.check()
    path, measured = Path(words[0]) if has_config else None, measure(from_run) if from_run else {}
    loaded = load_simulation(path, flags, measured=measured)
    print_measured(measured)
    console = TerminalConsole(title="simulate", to_stderr=True)
    with console.live():
        found = examine(loaded, console)
    print_findings(found)
    if output is not None:
        write_plots(output, f"plan: {path or from_run[0]}", found)
        click.echo(f"plots: {output}")


@cli.command("import-slime")
@click.argument("script", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The config to write; else SCRIPT's name, .toml.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def import_slime(script: Path, output: Path | None, force: bool) -> None:
    """Write the config that a launch script of slime stands for.

    SCRIPT is read, not run. Printed is what became of each flag: what maps, what is strop's default anyway, and what has
    no counterpart and why.
    """
    from strop.compat.import_slime import import_script, write_new

    output = output or Path(f"{script.stem}.toml")
    found = import_script(script, output.name)
    write_new(output, found.toml, force=force)
    click.echo(found.purpose)
    for title, lines in found.groups():
        click.secho(f"{title}: {len(lines)}", bold=True)
        for line in lines:
            click.echo(f"  {line}")
    what, flag = (" for strop sft", "--sft ") if found.command == "sft" else ("", "")
    click.echo(f"Wrote {output}{what}. strop explain {flag}{output} shows all of it.")


@cli.command("help", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
@click.option("--sft", "is_sft", is_flag=True, help="Options of strop sft.")
def help_(words: tuple[str, ...], is_sft: bool) -> None:
    """Look options up by a part of their name, or by words of their description; all of them without WORDS."""
    from strop.config.load import ROOTS
    from strop.config.reference import search
    from strop.observe.tables import print_entries

    found = search(ROOTS["sft" if is_sft else "train"], " ".join(words))
    if not found:
        raise UserError(f"no option has {' '.join(words)!r} in its name or description. strop help lists them all.")
    print_entries(found)


@cli.command()
@click.option("--sft", "is_sft", is_flag=True, help="The config of strop sft.")
def schema(is_sft: bool) -> None:
    """Print the JSON Schema of a config file, with which editors complete and check it."""
    import json

    from strop.config.load import ROOTS
    from strop.config.reference import json_schema

    click.echo(json.dumps(json_schema(ROOTS["sft" if is_sft else "train"]), indent=1))


@cli.command()
def doctor() -> None:
    """Print versions, devices, and which engines and trainers could run here."""
    from strop.runtime.doctor import examine

    for line in examine():
        click.echo(line)


def _config_of(target: Path) -> Path:
    """The config of a run folder, or the config itself."""
    return target / "config.toml" if target.is_dir() else target


def _allowed(command: Any, names: tuple[str, ...], resume: str | None) -> tuple[str, ...]:
    """What --allow-change names, as whole paths."""
    from strop.config.load import ROOTS
    from strop.config.resuming import allowed_changes, resume_word

    word = None if resume is None else resume_word(resume)
    return tuple(allowed_changes(ROOTS[command], names, resumes=word is not None))


def _load(
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


def main() -> None:
    """The entry point: exit code 2 for what a user can mend, 1 for a guard that stopped the run, 130 for Ctrl-C."""
    try:
        with interrupts.starting_up() as stop:
            try:
                code = _run()
            except BaseException:
                if not stop.is_set:
                    raise
                code = 130  # what an interrupted import makes of KeyboardInterrupt is no error of its own
            if stop.is_set or code == 130:
                code = 130
                interrupts.ignore()
    except KeyboardInterrupt:  # between two handlers
        code = 130
        interrupts.ignore()
    if code == 130:
        click.echo("stopped.", err=True)
    sys.exit(code)


def _run() -> int:
    try:
        cli(standalone_mode=False)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # whoever read our output has gone; the run has saved what it had
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if sys.argv[1:2] in (["train"], ["sft"]):
            click.echo("stopped: nobody reads the output any more; what was learned is saved.", err=True)
        return 1
    except UserError as error:
        # A config's problems are one a line; a value in another message may be of several lines, and is none of them.
        several = isinstance(error, ConfigError)
        problems = str(error).split("\n") if several else [" ".join(str(error).split())]
        click.secho(
            "error: " + (problems[0] if len(problems) == 1 else f"{len(problems)} problems"), fg="red", err=True
        )
        for problem in problems if len(problems) > 1 else ():
            click.echo(f"  - {problem}", err=True)
        return 2
    except StropError as error:
        click.secho(f"stopped: {error}", fg="red", err=True)
        return 1
    return 0


if __name__ == "__main__":
    main()
