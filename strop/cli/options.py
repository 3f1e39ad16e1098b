"""Commands that say what options there are, what they are in a config, and what they move."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from strop import interrupts
from strop.cli.shared import ANY_FLAGS, OPTIONS_HELP, cli, config_of, load, with_flags
from strop.types import UserError


@cli.command(context_settings=ANY_FLAGS, epilog=OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--sft", "is_sft", is_flag=True, help="CONFIG is one of strop sft.")
@click.option("--diff", type=click.Path(path_type=Path), help="Print only where CONFIG and this one differ.")
@with_flags
def explain(config: Path, is_sft: bool, diff: Path | None, flags: tuple[str, ...]) -> None:
    """Print every option with its value, where the value comes from, and the objective as a formula.

    CONFIG, and what --diff names, may be a run folder: its config is meant.
    """
    command = "sft" if is_sft else "train"
    loaded = load(config_of(config), flags, command)
    from strop.config.tree import walk
    from strop.observe.tables import print_differences, print_options

    if diff is not None:
        print_differences(loaded, load(config_of(diff), (), command), titles=(str(config), str(diff)))
        return
    print_options(loaded)
    for _, table in walk(loaded):
        for warning in table.warnings():
            click.secho(f"warning: {warning}", fg="yellow")
    from strop.algorithms import likelihood_formula, objective_formula

    click.echo("\n" + (likelihood_formula(loaded) if is_sft else objective_formula(loaded)))


@cli.command(context_settings=ANY_FLAGS, epilog=OPTIONS_HELP)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--sft", "is_sft", is_flag=True, help="CONFIG is one of strop sft.")
@click.option("--all", "every_kind", is_flag=True, help="Look at every other kind of every table too.")
@click.option("--only", default="", metavar="TABLE", help="Look at one table, such as algorithm, or at one option.")
@with_flags
def audit(config: Path, is_sft: bool, every_kind: bool, only: str, flags: tuple[str, ...]) -> None:
    """Turn every option, one at a time, and show what each moves.

    CONFIG may be a run folder. Small runs on made-up prompts and scores go through the real objective, trainer and loop;
    neither your model nor your data is touched. Exit code 1 if there is an option that moves nothing, or one that could not
    be tried.
    """
    loaded = load(config_of(config), flags, "sft" if is_sft else "train")
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
