"""The entry point: exit codes, messages, and Ctrl-C while things are imported."""

from __future__ import annotations

import os
import sys

import click

from strop import interrupts
from strop.cli.shared import cli
from strop.types import ConfigError, StropError, UserError


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
