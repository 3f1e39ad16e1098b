"""The command that scores a model on held-out prompts."""

from __future__ import annotations

from pathlib import Path

import click

from strop import interrupts
from strop.cli.shared import ANY_FLAGS, OPTIONS_HELP, cli, with_flags


@cli.command("eval", context_settings=ANY_FLAGS, epilog=OPTIONS_HELP)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--show", default=4, show_default=True, help="How many answers to print.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON instead of tables.")
@with_flags
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
