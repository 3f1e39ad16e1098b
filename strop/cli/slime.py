"""The command that reads a launch script of slime."""

from __future__ import annotations

from pathlib import Path

import click

from strop.cli.shared import cli


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
