"""The command that simulates a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from strop import interrupts
from strop.cli.shared import ANY_FLAGS, cli
from strop.types import UserError


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


@cli.command(cls=_Planned, context_settings=ANY_FLAGS)
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
